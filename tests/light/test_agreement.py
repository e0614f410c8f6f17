"""Which trials agree, which group is taken for right, and when a reference trial is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cclsearch.scoring.agreement import MAX_REFERENCES, Ballot, Deviation, Vote

BOUND = 1e-6


def ballot_of(*groups: str) -> Ballot:
    """Groups as text: a letter for each trial, `r` for a reference."""
    ballot, number = Ballot(BOUND), 0
    for index, letters in enumerate(groups):
        for letter in letters:
            number += 1
            ballot.add(Vote(number, (7.0, 6.0 + index), is_reference=letter == "r"))
    return ballot


def test_a_deviation_is_relative_and_names_the_step():
    assert Vote(1, (7.0, 6.0, 5.0)).deviate(Vote(2, (7.0, 6.3, 5.1))) == Deviation(pytest.approx(0.3 / 6.3), 1)
    assert Vote(1, (7.0,)).deviate(Vote(2, (7.0, 1.0))).size == 0, "only steps that both have are compared"
    assert Vote(1, (0.0,)).deviate(Vote(2, (0.0,))).size == 0
    assert Vote(1, (-1.0,)).deviate(Vote(2, (1.0,))).size == 2


@pytest.mark.parametrize(
    ("groups", "right", "right_at_the_end"),
    [
        (("s",), 0, 0),
        (("ss",), 0, 0),
        (("s", "s"), None, None),
        (("ss", "s"), None, None),
        (("sss", "s"), None, 0),
        (("sssr", "s"), 0, 0),
        (("ssr", "s"), 0, 0),
        (("sr", "s"), None, None),
        (("sss", "sr"), None, None),
        (("sssr", "sr"), 0, 0),
        (("ssssssss", "srrr"), None, 1),
        (("ssssr", "srr"), None, 1),
        (("r", "r", "r", "s"), None, None),
        (("sss", "sss"), None, None),
        (("sssr", "ssss"), None, None),
    ],
)
def test_the_right_group(groups, right, right_at_the_end):
    """Three that agree are right if no reference contradicts; of contradicting references two or more decide."""
    ballot = ballot_of(*groups)
    found = [ballot.find_right(), ballot.find_right(is_last=True)]
    assert found == [None if n is None else ballot.groups[n] for n in (right, right_at_the_end)]


def test_a_reference_is_needed_only_while_trials_disagree_and_one_may_decide():
    assert not ballot_of("ssss").needs_reference()
    assert ballot_of("ssss", "s").needs_reference(), "the strategy chose the four, so they may be four cheats"
    assert not ballot_of("ssssr", "s").needs_reference()
    assert ballot_of("r", "r", "s").needs_reference()
    assert not ballot_of("r", "r", "r").needs_reference()


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-0.4, 0.4)), min_size=1, max_size=30))
def test_trials_of_one_program_are_one_group_and_those_of_two_never_are(trials):
    """Each trial runs one of four programs; rounding stays below the bound, other work differs by far more."""
    votes = [Vote(n, (7.0 * (1 + noise * BOUND), 6.0 + kind)) for n, (kind, noise) in enumerate(trials, 1)]
    ballot = Ballot.of(votes, BOUND)
    expected: dict[int, list[int]] = {}
    for number, (kind, _) in enumerate(trials, 1):
        expected.setdefault(kind, []).append(number)
    assert [group.trials for group in ballot.groups] == list(expected.values())
    assert sorted(ballot.trials) == list(range(1, len(trials) + 1))


@given(
    st.lists(st.booleans(), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=MAX_REFERENCES, max_size=MAX_REFERENCES),
)
def test_references_are_bounded_and_never_outvoted(cheats, references):
    """However many trials of the strategy cheat, honest references win."""
    ballot = Ballot.of([Vote(n, (6.0 + cheat,)) for n, cheat in enumerate(cheats, 1)], BOUND)
    asked = 0
    while ballot.needs_reference():
        ballot.add(Vote(100 + asked, (6.0 + references[asked],), is_reference=True))
        asked += 1
    assert asked <= MAX_REFERENCES
    assert (asked > 0) == (len(set(cheats)) == 2)
    right = ballot.find_right(is_last=True)
    assert right.num_references == max(group.num_references for group in ballot.groups)
    if asked and not any(references[:asked]):
        assert right.first.values == (6.0,)


@given(st.permutations([0, 0, 0, 1, 1, 2]))
def test_the_order_of_finishing_does_not_change_who_agrees(kinds):
    ballot = Ballot.of([Vote(n, (6.0 + kind,)) for n, kind in enumerate(kinds)], BOUND)
    assert sorted(len(group.votes) for group in ballot.groups) == [1, 2, 3]
