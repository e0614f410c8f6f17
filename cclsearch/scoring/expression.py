"""Arithmetic over an objective's parameters (`1 - weight`, `price_per_accelerator_hour / 3600`): + - * / only."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name

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
