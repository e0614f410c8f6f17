"""Lets a running search continue over a grown space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.launch.base import WorkloadUser
from cclsearch.loop.growth import Wanted, level_of, plan_growth
from cclsearch.loop.memory_filter import hold_back
from cclsearch.loop.session import Session
from cclsearch.propose.events import NOT_ADDED, Note
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import grow_spec
from cclsearch.run.spec import read_spec
from cclsearch.space.opening import Extend


def add_wanted(writer: RunWriter, session: Session) -> Session:
    """The session after what the LLM's last turn asks to add was added, or a note says why it was not.

    The turn is in the ledger before, so that a kill in between loses nothing.
    """
    turn = writer.state.wanted
    if turn is None:
        return session
    try:
        return grow_space(writer, session, turn.adds, why=turn.why, level=level_of(session.spec))
    except UserError as error:
        text = one_line(f"what turn {turn.turn} asks for is not added: {error}", 500)
        writer.record(Note(topic=NOT_ADDED, text=text).at(session.now_s()))
        return session


def check_growth(folder: Path, state: RunState, wanted: Wanted) -> None:
    """Raise UserError if the search in that folder cannot have these values; nothing is recorded."""
    plan_growth(read_spec(folder), state.growth, state.num_growths, wanted, level=Extend.LISTED)


def grow_space(
    writer: RunWriter, session: Session, wanted: Wanted, *, why: str = "", level: Extend = Extend.LISTED
) -> Session:
    """Record that these values were added to the search space; returns the session over the grown space.

    Trials that ran before a knob was added have its neutral value. Raises UserError if the search reads a recording,
    if something may not be added, or if no configuration would be.
    """
    original, state = read_spec(writer.folder), writer.state
    grown = plan_growth(original, state.growth, state.num_growths, wanted, level=level, why=why)
    writer.record(grown.event.at(session.now_s()))
    spec = grow_spec(session.spec, grown.event)
    if isinstance(session.jobs.launcher, WorkloadUser):
        session.jobs.launcher.use_workload(spec.card, grown.space)
    return replace(session, spec=spec, space=grown.space, held_back=hold_back(spec, grown.space))
