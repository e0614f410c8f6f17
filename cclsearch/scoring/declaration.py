"""The declaration of an objective in its YAML file; `cclsearch.scoring.objective` builds the objective from it."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction
from cclsearch.core.numbers import parse_number
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Model
from cclsearch.core.yaml_file import read_yaml

BASELINE = "baseline"
"""Written in place of a number: the baseline trial's value."""

_CONSTRAINT = re.compile(r"\s*(?P<metric>[A-Za-z]\w*)\s*(?P<sign><=|>=)\s*(?P<bound>\S.*?)\s*")
_BOUND = re.compile(r"(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s*(?P<unit>[A-Za-z%].*))?", re.ASCII)
"""A number with an optional unit; any other bound is arithmetic over the parameters."""
Declared = TypeVar("Declared", bound=Model)
Parameters = Mapping[str, float | str | None]
"""Name -> a number, its text, `baseline`, or null."""
NAME = r"^[a-z][a-z0-9_]{0,60}$"
Finite = Annotated[float, Field(allow_inf_nan=False)]
_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of an objective",
    "string_pattern_mismatch": "must be lower-case letters, digits and underscores, a letter first",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping, or for a constraint a text such as `peak_memory_gib <= 70`",
}
"""Type of a pydantic error -> message in its place."""
_UNION_BRANCHES = frozenset({"float", "str", "literal['baseline']", "constrained-float"})


class ParameterDeclaration(Model):
    """A parameter of an objective that a user may set (`--objective composite:weight=0.3`)."""

    default: Finite | Literal["baseline"] | None
    """A number, `baseline`, or null; with null a scale that uses the parameter is left out unless it is given."""
    at_least: Finite | None = None
    at_most: Finite | None = None
    above: Finite | None = None
    description: str = ""


class MetricDeclaration(Model):
    """One metric of an objective."""

    name: str = Field(pattern=NAME)
    direction: Direction
    unit: str | None = None
    """Checked against the unit that the metric is measured in."""
    weight: Finite | str | None = None
    """A number, or arithmetic over the parameters."""
    reference: Finite | str | None = None
    """Reference of a weighted metric: a number, `baseline`, or a parameter."""
    scale: Finite | str | None = None
    """Factor on the measured value; left out if a parameter in it is null."""
    scaled_unit: str | None = None
    """Unit of the scaled value."""
    source: Literal["script"] | None = None
    """`script`: the run script reports the metric (`metrics` of its `result.json`)."""


class ConstraintDeclaration(Model):
    """A bound that a trial must satisfy to be ranked; also written as text: `ttft_p99_s <= 0.5 s`."""

    metric: str = Field(pattern=NAME)
    at_least: Finite | str | None = None
    at_most: Finite | str | None = None
    unit: str | None = None
    source: Literal["script"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, data: Any) -> Any:
        if not isinstance(data, str):
            return data
        found = _CONSTRAINT.fullmatch(data)
        if found is None:
            raise ValueError("must be METRIC <= NUMBER or METRIC >= NUMBER, with the unit after it if you like")
        number = _BOUND.fullmatch(found["bound"])
        bound = {"at_most" if found["sign"] == "<=" else "at_least": number["number"] if number else found["bound"]}
        return {"metric": found["metric"], "unit": number["unit"] if number else None, **bound}

    @model_validator(mode="after")
    def _has_a_bound(self) -> ConstraintDeclaration:
        if self.at_least is None and self.at_most is None:
            raise ValueError("needs `at_least` or `at_most`")
        return self


class ObjectiveDeclaration(Model):
    """The whole file."""

    version: Literal[1]
    description: str = ""
    parameters: dict[str, ParameterDeclaration] = {}
    metrics: tuple[MetricDeclaration, ...] = Field(min_length=1)
    constraints: tuple[ConstraintDeclaration, ...] = ()


def read_declaration(path: Path) -> ObjectiveDeclaration:
    """The declaration in the file; raises UserError that names file and field."""
    return _validate(ObjectiveDeclaration, read_yaml(path), str(path))


def read_constraint(text: str, where: str) -> ConstraintDeclaration:
    """The constraint in a text such as `peak_memory_gib <= 70`; raises UserError that names `where`."""
    return _validate(ConstraintDeclaration, text, where)


def _validate(model: type[Declared], data: Any, where: str) -> Declared:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = _field_path(first["loc"])
        message = _MESSAGES.get(first["type"], first["msg"].removeprefix("Value error, "))
        found = "" if first["type"] == "missing" else f"; it is {one_line(repr(first['input']), 80)}"
        raise UserError(f"{where}: {f'{field}: ' if field else ''}{message}{found}") from None


def resolve_parameters(
    declared: Mapping[str, ParameterDeclaration], given: Parameters, where: str
) -> dict[str, float | str | None]:
    """Every parameter's value: given or default; raises UserError for an unknown name or a value out of bounds."""
    for name in given:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise UserError(f"{where}: there is no parameter {name!r}{guess_name(name, declared)}; known: {known}")
    values: dict[str, float | str | None] = {}
    for name, parameter in declared.items():
        value = _number_or_baseline(given[name], f"{where}: {name}") if name in given else parameter.default
        if isinstance(value, float | int):
            _check_bounds(value, parameter, f"{where}: {name}")
        elif value == BASELINE and parameter.default != BASELINE:
            raise UserError(f"{where}: {name}: must be a number; it is {value!r}")
        values[name] = value
    return values


def _number_or_baseline(value: float | str | None, where: str) -> float | str | None:
    if value is None or value == BASELINE:
        return value
    try:
        return parse_number(str(value))
    except ValueError:
        raise UserError(f"{where}: must be a finite number; it is {value!r}") from None


def _check_bounds(value: float, parameter: ParameterDeclaration, where: str) -> None:
    if parameter.at_least is not None and value < parameter.at_least:
        raise UserError(f"{where}: must be at least {parameter.at_least:g}; it is {value:g}")
    if parameter.at_most is not None and value > parameter.at_most:
        raise UserError(f"{where}: must be at most {parameter.at_most:g}; it is {value:g}")
    if parameter.above is not None and value <= parameter.above:
        raise UserError(f"{where}: must be above {parameter.above:g}; it is {value:g}")


def _field_path(parts: tuple[int | str, ...]) -> str:
    """Path such as `metrics[0].direction`, without the union branch that pydantic appends."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_BRANCHES:
            path += f".{part}" if path else part
    return path


_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def parameter_names(text: str, where: str) -> frozenset[str]:
    """Parameters in the expression; raises UserError (naming `where`) if it is not such arithmetic."""
    return frozenset(node.id for node in ast.walk(_parse(text, where)) if isinstance(node, ast.Name))


def evaluate(text: str, parameters: Mapping[str, float], where: str) -> float:
    """The expression's finite value; raises UserError (naming `where`) for anything else."""
    try:
        value = _value(_parse(text, where), parameters, where)
    except (ZeroDivisionError, OverflowError):
        value = math.inf
    if not math.isfinite(value):
        raise UserError(f"{where}: {text!r} has no finite value at {dict(parameters)}")
    return value


def _parse(text: str, where: str) -> ast.expr:
    if len(text) > 200:
        raise UserError(f"{where}: an expression has at most 200 characters; this one has {len(text)}")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(
            f"{where}: {text!r} is not arithmetic over parameters (numbers, names, + - * / and brackets)"
        ) from None


def _value(node: ast.expr, parameters: Mapping[str, float], where: str) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name):
        if node.id not in parameters:
            known = ", ".join(parameters) or "none"
            raise UserError(
                f"{where}: there is no parameter {node.id!r}{guess_name(node.id, parameters)}; known: {known}"
            )
        return parameters[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, parameters, where)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_value(side, parameters, where) for side in (node.left, node.right))
        return _OPERATORS[type(node.op)](left, right)
    raise UserError(f"{where}: only numbers, parameters, + - * / and brackets are allowed, not {ast.unparse(node)!r}")
