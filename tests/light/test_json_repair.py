"""A broken value of an object costs that value only."""

from __future__ import annotations

import json
import random

import pytest

from cclsearch.trace.readers.json_repair import Broken, repair_object


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"a": , "b": 1}', {"a": None, "b": 1}),
        ('{"args": {"x": , "y": 2}, "b": 1}', {"args": {"y": 2}, "b": 1}),
        ('{"a": -nan(ind), "b": 1.#INF, "c": inf, "d": 1}', {"a": None, "b": None, "c": None, "d": 1}),
        ('{"a": tru, "b": 1e, "c": -, "d": 1.2.3, "e": 5}', {"a": None, "b": None, "c": None, "d": None, "e": 5}),
        ('{"a": .5, "b": 12., "c": 0x1F, "d": +3}', {"a": 0.5, "b": 12.0, "c": 31, "d": 3}),
        ('{"ts": 1,234.5, "dur": 1}', {"ts": None, "dur": 1}),
        ('{"a": default_pg, "b": \'x\', "c": 1}', {"a": None, "b": None, "c": 1}),
        (
            '{"name": "Library("_t", "IMPL")\n(1): <m>", "pid": 2}',
            {"name": 'Library("_t", "IMPL")\n(1): <m>', "pid": 2},
        ),
        (r'{"name": "torch\cuda\__init__.py", "pid": 2}', {"name": r"torch\cuda\__init__.py", "pid": 2}),
        ('{"a": "x\x00\x1by", "b": , "c": 1}', {"a": "x\x00\x1by", "b": None, "c": 1}),
        ('{"ts": 1, tid": 0, pid: 3, "b": 2}', {"ts": 1, "tid": 0, "pid": 3, "b": 2}),
        ('{"a": 1 "b": 2,, "c": 3,}', {"a": 1, "b": 2, "c": 3}),
        ('{"a": [1, , 2], "b": [[nan, 3]], "c": [1, 2}', {"a": [1, None, 2], "b": [[None, 3]], "c": None}),
    ],
)
def test_every_other_member_is_kept(text, kept):
    assert repair_object(text) == (kept, len(text), True)


def test_an_object_without_its_end_says_so():
    assert repair_object('{"a": {"b": 1}') == ({"a": {"b": 1}}, 15, False)


def test_what_is_not_an_object_or_is_nested_too_deeply_is_refused():
    for text in ("[1]", '{"a": ' + "[" * 100):
        with pytest.raises(Broken):
            repair_object(text)


def test_what_is_not_broken_is_read_as_by_the_standard_parser():
    draw = random.Random(1)

    def value(depth: int):
        kind = draw.randrange(7 if depth < 4 else 5)
        if kind == 5:
            return [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 6:
            return {f"k {n}": value(depth + 1) for n in range(draw.randrange(4))}
        text = "".join(draw.choice('ab"\\,:{}[]\n é😀') for _ in range(draw.randrange(12)))
        return (text, draw.random() * 10 ** draw.randrange(-9, 20), draw.randrange(-5, 10**12), True, None)[kind]

    for _ in range(2000):
        document = {f"k{n}": value(0) for n in range(draw.randrange(1, 6))}
        text = json.dumps(document, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        assert repair_object(text) == (document, len(text), True), text
