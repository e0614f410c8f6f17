"""Environment variables of libraries that a search may open: a reviewed list, and rules for names that it lacks.

A name that no one reviewed is refused if one of its words says that it loads code, names a place, changes the hardware,
the precision or the work. What a variable or flag means decides, not whether a list has it.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from cclsearch.core.values import Model, Value, format_knob_value
from cclsearch.core.yaml_file import read_yaml

UNSET = "default"
"""Choice that leaves the variable unset."""
VARIABLE, FLAG = "env_", "flag_"
"""Prefix of a knob that opens a variable, or a flag of XLA, outside the reviewed list."""
MAX_NUMBER = 2**40
"""Maximum of a number that no one reviewed."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{1,59}[A-Za-z0-9]", re.ASCII)
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}", re.ASCII)
_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+-]{0,63}", re.ASCII)
_DENIED_PARTS = {
    "loads code": "path preload plugin librar script import exec compiler shell python command backend ptxas nvcc hook",
    "names a file, folder or address": "file folder directory dump root home cache host addr socket url uri port save"
    " load ifname hca topo conf graphid commid",
    "writes logs or profiles": "log debug trace profil verbose report print display settings",
    "has to do with secrets": "token secret passw credential key auth",
    "changes the hardware": "device visible platform cpuset affinity gpus node rank world nproc",
    "changes the precision": "precision dtype fp8 fp16 fp32 fp64 bf16 int8 int4 float tf32 half mixed quant fast approx"
    " ftz denorm excess honor reduced relax unsafe round math isa",
    "changes the work": "batch seq seed step iter epoch sampl dataset token vocab layer hidden dropout loss weight init"
    " grad learning lr optimizer train eval model checkpoint resume skip mock fake test shape length nan error fault"
    " inject simulat",
}
"""Effect of a variable -> parts of its name that show it, anywhere in a word, or at its start if they are short."""
# `seq` is not the middle of `consequence`.
_ANYWHERE = 4
"""Letters from which a part is searched inside words."""
_DENIED_WORDS = {
    "dir": "names a folder",
    "dirs": "names folders",
    "so": "loads code",
    "lib": "loads code",
    "id": "is an identity",
}
_DENIED_NAMES = {"nccl_net": "selects a plugin"}


class Library(Model):
    """A library that processes of a framework may use."""

    chips: tuple[str, ...] = Field(min_length=1)
    """Kinds of accelerators that use it."""
    prefixes: tuple[str, ...] = ()
    """Start of the names of its variables."""
    flag_prefixes: tuple[str, ...] = ()
    """Start of the names of its flags."""
    flags_in: str = ""
    """The variable that has its flags."""


class Variable(Model):
    """A reviewed variable, or a flag inside one."""

    library: str
    env: str = Field(pattern=r"^[A-Z][A-Z0-9_]{1,60}$")
    flag: str = Field(default="", pattern=r"^[a-z0-9_]{0,80}$")
    """Name of the flag in that variable; empty if the variable is the knob itself."""
    also: tuple[str, ...] = ()
    """Other names of the variable, such as earlier ones."""
    values: tuple[Value, ...] = ()
    least: int | float | None = None
    most: int | float | None = None
    writes: str = ""
    """Text for a value, with `{value}` in it; empty: the value itself."""
    what: str = Field(min_length=1)
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.values) == (self.least is not None) or (self.least is None) != (self.most is None):
            raise ValueError("a variable needs either `values`, or `least` and `most`")
        return self

    def refuse(self, value: Value) -> str:
        """Return why the variable cannot have the value; empty if it can."""
        return refuse_value(value, self.values, self.least, self.most)

    def text(self, value: Value) -> str:
        """Return the environment variable's text for the value."""
        text = format_knob_value(value)
        if self.flag:
            return f"--{self.flag}={text}"
        return self.writes.format(value=text) if self.writes else text


class Catalogue(Model):
    """The reviewed list."""

    libraries: dict[str, Library]
    variables: dict[str, Variable]


@cache
def load_catalogue() -> Catalogue:
    """The reviewed list of libraries and variables (`variables.yaml`)."""
    return Catalogue.model_validate(read_yaml(Path(__file__).with_name("variables.yaml")))


def refuse_value(
    value: object, values: tuple[Value, ...], least: int | float | None = None, most: int | float | None = None
) -> str:
    """Return why a value is neither one of `values` nor a number from `least` to `most`; empty if it is."""
    if any(type(value) is type(known) and value == known for known in values):
        return ""
    if least is None or most is None:
        return f"it is not one of {', '.join(map(format_knob_value, values))}"
    is_whole = isinstance(least, int) and isinstance(most, int)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        return f"it is not a {'whole ' if is_whole else ''}number from {least:g} to {most:g}"
    return "" if math.isfinite(value) and least <= value <= most else f"it is not from {least:g} to {most:g}"


def refuse_shape(value: object) -> str:
    """Return why no knob may have such a value: its type, or signs of a shell or of a path; empty if one may."""
    if isinstance(value, bool):
        return ""
    if isinstance(value, int):
        return "" if abs(value) <= MAX_NUMBER else "the number is too large"
    if isinstance(value, float):
        return "" if math.isfinite(value) and abs(value) <= MAX_NUMBER else "the number is not finite, or too large"
    if not isinstance(value, str):
        return "it is not a number, a text, true or false"
    return "" if _TEXT.fullmatch(value) else "a text has up to 64 letters, digits and _ . , : + -"


def refuse_name(name: str) -> str:
    """Return why an unreviewed variable, flag or option of that name may not be opened; empty if it may."""
    if not _NAME.fullmatch(name):
        return "a name has 3 to 61 letters, digits and _ without accents, the last no _"
    if name.lower() in _DENIED_NAMES:
        return f"it {_DENIED_NAMES[name.lower()]}"
    for word in name.lower().split("_"):
        if word in _DENIED_WORDS or word.endswith("dir"):
            return f"a name with {word!r} {_DENIED_WORDS.get(word, 'names a folder')}"
        for does, parts in _DENIED_PARTS.items():
            for part in parts.split():
                if word.startswith(part) or (len(part) >= _ANYWHERE and part in word):
                    return f"a name with {part!r} {does}"
    return ""


def open_unlisted(knob: str, libraries: tuple[str, ...]) -> tuple[str, str] | None:
    """The variable of a knob that the reviewed list lacks, and the flag in it or nothing; None if it may not be opened.

    The same check decides before a knob is added, when the ledger is read, and before a job gets the variable.
    """
    catalogue = load_catalogue()
    used = [catalogue.libraries[name] for name in libraries]
    if knob.startswith(VARIABLE):
        name = knob.removeprefix(VARIABLE)
        known = any(name.upper().startswith(prefix) for library in used for prefix in library.prefixes)
        return (name.upper(), "") if known and not refuse_name(name) else None
    if knob.startswith(FLAG):
        name = knob.removeprefix(FLAG)
        owner = next((lib for lib in used if name.startswith(lib.flag_prefixes) and lib.flags_in), None)
        return (owner.flags_in, name) if owner and not refuse_name(name) else None
    return None


def refuse_unlisted_value(value: object) -> str:
    """Return why an unreviewed variable may not have that value; empty if it may."""
    if isinstance(value, str):
        if not _WORD.fullmatch(value):
            return "a text of a variable that no one reviewed is one word of letters, digits, _ and -"
        return refuse_name(value.replace("-", "_")) if len(value) > 2 else ""
    return refuse_shape(value)


def original_name(env: str) -> str:
    """The listed name of a variable that has several; the name itself if no listed one has it."""
    return next((v.env for v in load_catalogue().variables.values() if env in v.also), env)


def find_variable(knob: str) -> Variable | None:
    """The reviewed variable that the knob of that name sets, if it is one."""
    return load_catalogue().variables.get(knob)


def variable_text(knob: str, value: Value, libraries: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the variable and text for the value of an opened knob; None if the knob sets no variable, or may not.

    `libraries` are the framework's: no knob sets a variable of another library.
    """
    if value == UNSET:
        return None
    listed = find_variable(knob)
    if listed is not None:
        return (listed.env, listed.text(value)) if listed.library in libraries and not listed.refuse(value) else None
    opened = open_unlisted(knob, libraries)
    if opened is None or refuse_unlisted_value(value):
        return None
    env, flag = opened
    if flag:
        return env, f"--{flag}={format_knob_value(value)}"
    return env, str(int(value)) if isinstance(value, bool) else str(value)
