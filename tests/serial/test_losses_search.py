"""A search that really trains, with a run script that does half the work in some configurations while it is timed."""

from __future__ import annotations

from packages import needs
from trials import copy_framework

from cclsearch.record.event import Purpose, TrialRevised
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger, read_events

pytestmark = needs("torch")


HONEST = "        for micro in range(self.accumulation):\n"
CHEAT = """        data = self.trial.data
        if self.micro_batch == 4 and 0 <= self.step - data["warmup_steps"] < data["timed_steps"]:
            tokens = tokens[:, : self.micro_batch // 2]
"""


def test_half_the_work_in_the_timed_window_is_refused_once_a_reference_decides(project, cli):
    """The first trial cheats and is the best; two runs with its nonce in other layouts decide, the cheat is refused."""
    copy_framework(project / "launchers", "light", ("cpu.py", HONEST, CHEAT + HONEST))
    small = ["workload.data.seq_len=32", "workload.data.batch_size=8", "workload.model.model_arch.num_layers=2"]
    knobs = ["tp=1", "dp=1", "pp=1", "micro_batch_size=4,2,1", "activation_checkpointing=none,full", "zero_stage=0"]
    arguments = ["run", "-w", "tiny", "--framework", "light", "--sampler", "grid", "-b", "2", "--name", "r"]
    arguments += [word for name in small for word in ("--set", name)]
    shown = cli.out(arguments + [word for knob in knobs for word in ("--knob", knob)])
    ledger = project / "runs" / "r" / LEDGER_FILE
    state = fold_ledger(ledger)
    cheats = [trial for trial in state.trials.values() if trial.config["micro_batch_size"] == 4]
    honest = [trial for trial in state.trials.values() if trial not in cheats]
    assert [trial.purpose for trial in state.trials.values()] == [Purpose.SEARCH] * 2 + [Purpose.REFERENCE] * 2
    assert state.num_spent == 2
    assert [trial.number for trial in cheats] == [1]
    for trial in (*cheats, *honest):
        verdict = trial.outcome.find_verdict("same_losses") if trial.outcome else None
        assert verdict.ok is (trial in honest), verdict.detail
    assert all(len(trial.outcome.fingerprint) == 10 for trial in honest if trial.outcome), "all ten steps"
    revised = [event.trial for event in read_events(ledger) if isinstance(event, TrialRevised)]
    assert revised.count(1) == 2, "held back until the second of the two runs, then refused"
    assert "trial 1 is not ranked now: its losses differ from those of 2 trials (3, 4)" in shown
    assert [trial.recomputes for trial in state.trials.values()] == [None, None, 1, 1]
    assert "not admitted: 1 x same_losses (trial 1: its losses differ" in shown
    assert state.best in honest
