"""Environment variables of libraries that a search may open: a reviewed list, and rules for names that it lacks.

A name that no one reviewed is refused unless all its words are known to be of performance alone; what the reviewed list
has, in any spelling, is opened with its reviewed values only. `variables.yaml` has the list and the words.
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
# `seq` is not the middle of `consequence`, and `in` with `it` is not `init`.
_ANYWHERE = 4
"""Letters from which a part is searched inside words, and harmless words may be written together."""
_AFFIXES = frozenset({"env", "flag", "no", "not", "non", "enable", "enabled", "disable", "disabled", "use", "set"})
"""Words that make another spelling of a name, or its negation."""
_SHORTEST = 10
"""Shortest beginning of a reviewed name that means the name, as in argument parsers."""
MAX_THREADS = 1024
"""Maximum of a number of threads if nothing says how many cores there are."""
_THREADS = re.compile(r"(?:^|_)n?(?:um_)?(?:threads?|workers?|procs?|cores?|parallelism)(?:_|$)|_threads?_limit")


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
    harmless: dict[str, str]
    """Concept -> words of names that no one reviewed."""
    refused: dict[str, str]
    """Effect of a variable -> parts of its name that show it."""
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
    if other := find_reviewed(name):
        return f"it is {other}, which was reviewed: ask for that, with its values"
    return refuse_words(name.lower())


@cache
def refuse_words(name: str) -> str:
    """Return why a name in lower case, reviewed or not, has words that are not of performance alone; else empty."""
    prefixes = {p.lower() for lib in load_catalogue().libraries.values() for p in (*lib.prefixes, *lib.flag_prefixes)}
    bare = name.removeprefix(max((p for p in prefixes if name.startswith(p)), key=len, default=""))
    unknown = [word for word in _harmless().sub("_", f"_{bare}_").split("_") if word]
    for does, parts in load_catalogue().refused.items():
        for part in parts.split():
            if any(word.startswith(part) or (len(part) >= _ANYWHERE and part in word) for word in unknown):
                return f"a name with {part!r} {does}"
    if unknown:
        return f"no one reviewed what {unknown[0]!r} in a name does"
    return "" if bare.strip("_0123456789") and "__" not in name else "it names nothing"


@cache
def _harmless() -> re.Pattern[str]:
    """Matches harmless words with the `_` around them; long ones may be written together, with `n` for a number."""
    words = sorted({*" ".join(load_catalogue().harmless.values()).split()}, key=len, reverse=True)
    glued = "|".join(word for word in words if len(word) >= _ANYWHERE)
    return re.compile(rf"(?<=_)(?:n?(?:{glued})+|{'|'.join(words)}|[0-9]+)[0-9]*(?=_)")


def find_reviewed(name: str, *, is_exact: bool = False) -> str:
    """The reviewed knob that a name spells; empty if none.

    In any case, with dashes, underscores, camelCase or a prefix; unless `is_exact` also with `no`, or cut short.
    """
    letters = _letters(name, frozenset({"env", "flag"}) if is_exact else _AFFIXES)
    known = _spellings(is_exact)
    if letters in known or is_exact:
        return known.get(letters, "")
    letters = letters.removeprefix("no")
    return next((known[key] for key in known if len(letters) >= _SHORTEST and key.startswith(letters)), "")


def _letters(name: str, dropped: frozenset[str]) -> str:
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return "".join(word for word in words if word not in dropped)


@cache
def _spellings(is_exact: bool) -> dict[str, str]:
    """The letters of each name of a reviewed variable or flag -> its knob."""
    return {
        _letters(name, frozenset() if is_exact else _AFFIXES): knob
        for knob, variable in load_catalogue().variables.items()
        for name in (knob, variable.flag or variable.env, *variable.also)
    }


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
        return refuse_words(value.replace("-", "_").lower()) if len(value) > 2 else ""
    return refuse_shape(value)


def refuse_threads(name: str, value: object, cores: int | None) -> str:
    """Return why a variable or knob of that name, if it counts threads, may not have that value on these cores."""
    most = cores or MAX_THREADS
    if not _THREADS.search(name.lower()) or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return "" if value <= most else f"a rank has {most} cores at most, so it counts no more threads"


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
