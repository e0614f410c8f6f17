"""Reports of a run."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paths import TESTS
from recorded_runs import search, write_recording
from report_pages import HOSTILE, make_page, make_trial

from cclsearch.analysis.report_pages import (
    MAX_OBSERVATIONS,
    build_page,
    find_importance,
    neighbor_rows,
    pick_nearest,
    read_step,
)
from cclsearch.charts.chart import Chart
from cclsearch.cli import main
from cclsearch.core.values import Config
from cclsearch.loop.session import rebuild_space
from cclsearch.plugins import TASKS
from cclsearch.propose.observations import Observation
from cclsearch.record.event import RetryKind, TrialRetried
from cclsearch.record.state import RunState
from cclsearch.report.data import RunPage, compare_frameworks, draw_comparisons, draw_run, find_differences, rank_runs
from cclsearch.report.figures import ObjectiveFigure
from cclsearch.report.gather import describe_change, gather_run
from cclsearch.report.page import dump_for_script, render_page
from cclsearch.report.rows import gather_turns
from cclsearch.report.terminal import describe_event
from cclsearch.run.folder import load_run


class Elements(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_loads_nothing_and_allows_no_foreign_script():
    page = render_page([make_page()])
    elements = Elements(page)
    assert len(elements.of("script")) == 4
    assert elements.of("img") == elements.of("link") == elements.of("iframe") == []
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    policy = next(m["content"] for m in elements.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_text_from_outside_stays_text():
    page = render_page([make_page(), make_page("other" + HOSTILE)])
    assert HOSTILE not in page
    assert 'onerror="document' not in page
    elements = Elements(page)
    assert len(elements.of("script")) == 4
    assert all(not name.startswith("on") for _, attributes in elements.tags for name in attributes)


def test_the_data_in_the_page_is_json_that_cannot_end_its_element():
    text = dump_for_script({"why": HOSTILE + "\u2028"})
    assert "<" not in text
    assert json.loads(text) == {"why": HOSTILE + "\u2028"}
    with pytest.raises(ValueError, match="JSON"):
        dump_for_script({"loss": float("nan")})


def charts_of(page: RunPage) -> dict[str, Chart]:
    return {chart.name: chart for chart in draw_run(page)}


def test_figures_that_were_not_measured_are_marked_in_page_and_charts():
    page = make_page(provenance="recorded")
    shown = render_page([page])
    assert 'class="badge recorded"' in shown
    assert "Best: trial 6: step time 0.5 s (recorded), 2x faster than trial 1, the first ranked one" in shown
    assert "(recorded)" in str(charts_of(page)["progress"].spec)


def test_the_history_shows_every_trial_and_its_failure():
    chart = charts_of(make_page())["progress"]
    rows = [row for layer in chart.spec["layer"] for row in layer.get("data", {}).get("values", [])]
    failed = [row for row in rows if row.get("kind") in ("failed", "not admitted")]
    kinds = {row["trial"]: row["kind"] for row in (*chart.spec["data"]["values"], *failed)}
    words = ["ranked", "failed", "ranked", "ranked", "not admitted", "best", "confirmation"]
    assert kinds == dict(enumerate(words, 1))
    assert "out_of_memory" in failed[0]["note"]
    assert "5 of 7 trials admitted (1 failed, 1 not admitted)" in chart.summary


def test_charts_without_data_are_left_out_and_not_drawn_empty():
    empty = make_page(trials=(make_trial(1, None),), best=None, baseline=None, neighbors=())
    assert set(charts_of(empty)) <= {"strip"}
    assert "no such" not in render_page([empty])


def test_the_causes_chart_compares_best_and_baseline():
    chart = charts_of(make_page())["causes"]
    assert len(chart.spec["data"]["values"]) == 6
    assert "best (trial 6): compute 0.6" in chart.summary
    assert "baseline (trial 1): compute 0.6" in chart.summary


def test_a_metric_that_is_a_function_of_the_other_has_no_chart():
    page = make_page()
    assert not [name for name in charts_of(page) if "mfu" in name]
    trials = tuple(replace(t, metrics={**t.metrics, "mfu": 0.1 * (t.number % 4)}) for t in page.trials if t.metrics)
    assert [name for name in charts_of(replace(page, trials=trials)) if "mfu" in name] == ["step-time-mfu"]


def test_a_ranking_compares_only_equal_work_hardware_and_provenance():
    pages = [
        make_page("a", framework="megatron"),
        make_page("b", framework="torchtitan", trials=(make_trial(1, 0.4),), best=1),
        make_page("c", hardware="16 x h100", trials=(make_trial(1, 0.1),), best=1),
        make_page("d", provenance="recorded", trials=(make_trial(1, 0.01),), best=1),
    ]
    ranks = {entry.page.run_id: (entry.rank, entry.ratio) for entries in rank_runs(pages) for entry in entries}
    assert ranks == {"b": (1, 1.0), "a": (2, pytest.approx(1.25)), "c": (1, 1.0), "d": (1, 1.0)}
    lines = compare_frameworks(pages)
    assert len(lines) == 1
    assert "the best of torchtitan is 1.25x faster than the best of megatron (0.5 s -> 0.4 s)" in lines[0]
    ties = [make_page(name, trials=(make_trial(1, 0.77),), best=1) for name in "xyz"]
    assert [entry.rank for entries in rank_runs(ties) for entry in entries] == [1, 1, 1]


def test_a_group_of_runs_has_its_own_table_charts_and_differences():
    slower = make_page("b", trials=(make_trial(1, 0.9), make_trial(3, 0.6)), best=3)
    pages = [make_page("a"), slower, make_page("c", hardware="16 x h100")]
    groups = rank_runs(pages)
    assert [[entry.page.run_id for entry in entries] for entries in groups] == [["a", "b"], ["c"]]
    assert [chart.name for chart in draw_comparisons(groups[0], "x-")][:2] == ["x-bests", "x-curves"]
    assert find_differences(groups[0]) == [("checkpointing", ["true", "false"])]
    html = render_page(pages)
    assert html.count('class="sortable ranking"') == 2
    assert "Knobs in which the winners differ" in html


def test_every_chart_has_a_place_a_title_and_a_text():
    elements = Elements(render_page([make_page()]))
    places = [attributes["data-chart"] for attributes in elements.of("div") if "data-chart" in attributes]
    assert len(places) >= 6
    assert len(elements.of("figure")) == len(elements.of("figcaption")) == len(places)


def test_winner_is_first_and_the_notes_to_the_operator_are_folded():
    page = render_page([make_page(launch="torchrun x.py", job_script="#SBATCH -N 2", damage=("line 3 is cut",))])
    body = page[page.index("<main") :]
    texts = ("line 3 is cut", "Best: trial 6", "torchrun x.py", "#SBATCH", "Notes to the operator")
    places = [body.index(text) for text in texts]
    assert places == sorted(places)
    assert places[-1] < body.index("data-chart")


def test_evidence_is_linked_relative_to_the_page(tmp_path):
    trials = (make_trial(1, 1.0, files=("stdout.log", "trace")), make_trial(2, None))
    page = make_page(trials=trials, best=1, folder=tmp_path / "runs" / "a b")
    links = [a["href"] for a in Elements(render_page([page], base=tmp_path)).of("a")]
    assert "runs/a%20b/trials/0001/stdout.log" in links
    assert not [link for link in links if link and (link.startswith("/") or "trials/0002" in link)]
    assert str(tmp_path) not in render_page([page], base=tmp_path / "elsewhere")
    assert "stdout.log" not in render_page([page])


def test_a_conversation_with_an_llm_is_readable(tmp_path):
    (tmp_path / "turns").mkdir()
    answer = {"text": '{"tool": "submit", "why": "a\\nb"}', "calls": [{"name": "predict", "arguments": {"tp": 2}}]}
    record = {"turn": 1, "system": "You tune.", "user": "STATE " + HOSTILE, "decision": "submit"}
    looked = [{"id": "1", "text": "step_time_s 0.5 " + HOSTILE}, {"id": "2", "text": "no knob", "is_error": True}]
    record["exchanges"] = [
        {"answer": answer, "results": looked},
        {"answer": None, "error": "rate_limit", "message": "later"},
    ]
    (tmp_path / "turns" / "0001.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "turns" / "0002.json").write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "turns" / "0003.json").symlink_to(tmp_path / "turns" / "0001.json")
    [turn] = gather_turns(tmp_path)
    assert [message.role for message in turn.messages] == [
        "system", "engine", "assistant", "assistant", "engine", "engine", "engine",
    ]  # fmt: skip
    assert [message.who for message in turn.messages[4:6]] == [
        "ccl-search answers the call",
        "ccl-search refuses the call",
    ]
    assert turn.messages[4].text.startswith("step_time_s 0.5")
    assert "a\nb" in turn.messages[2].text
    page = render_page([make_page(turns=(turn,))])
    assert "What the LLM said (1 turn)" in page
    assert "rate_limit: later" in page
    assert HOSTILE not in page


def test_ids_are_unique_over_several_runs():
    elements = Elements(render_page([make_page("a"), make_page("b")]))
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_command_writes_a_page_and_pictures_for_one_run_and_for_all(project, cli):
    toy = write_recording(project / "toy")
    search(toy, "a", budget=5)
    search(toy, "b", "--sampler", "grid", budget=5)
    assert main(["report", "a"]) == 0
    assert Path("runs/a/report.html").is_file()
    assert Path("runs/a/charts/progress.png").is_file()
    assert main(["report", "--all", "--out", "all.html", "--no-png"]) == 0
    page = Path("all.html").read_text(encoding="utf-8")
    assert "2 runs compared" in page
    assert "<script>alert('card')" not in page
    assert "there is no run 'nowhere'" in cli.err(["report", "nowhere"])


def test_untried_neighbors_of_the_winner_have_a_predicted_step_time(project):
    run = search(write_recording(project / "toy"), "a", budget=3)
    best = run.state.best
    space = rebuild_space(run.spec)
    tried = {space.row(trial.config) for trial in run.state.trials.values()}
    steps = [space.config(row) for row in neighbor_rows(space, best.config) if row is not None and row not in tried]
    changes = {describe_change(best.config, config) for config in steps}
    untried = [neighbor for neighbor in build_page(run).neighbors if neighbor.trial is None]
    assert changes
    assert {neighbor.change for neighbor in untried} <= changes
    assert all(neighbor.ratio > 0 for neighbor in untried)
    whole = search(write_recording(project / "again"), "b", budget=9)
    assert all(neighbor.trial is not None for neighbor in build_page(whole).neighbors)


def test_a_retried_trial_is_announced_with_the_reason_and_the_next_attempt():
    step_time = ObjectiveFigure(TASKS.get("training").primary_metric)
    event = TrialRetried(time_s=0.0, trial=3, attempt=1, kind=RetryKind.FAILURE, reason="preempted: node n1")
    assert describe_event(event, RunState(), 5, step_time) == "trial   3  retrying (preempted: node n1), attempt 2"
    stopped = TrialRetried(time_s=0.0, trial=3, attempt=1, kind=RetryKind.CANCELLED, reason="stopped")
    assert describe_event(stopped, RunState(), 5, step_time) == "trial   3  cancelled; it runs again on resume"


def test_a_run_without_a_finished_trial_has_a_report(project):
    run = search(write_recording(project / "toy"), "a", budget=1)
    first = (run.folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (run.folder / "ledger.jsonl").write_text("\n".join(first) + "\n", encoding="utf-8")
    assert main(["report", "a"]) == 0
    assert "no trial was admitted" in Path("runs/a/report.html").read_text(encoding="utf-8")


def test_a_long_search_is_predicted_from_the_trials_nearest_its_winner():
    configs = [Config(tp=tp, pp=pp, bucket=n) for n in range(40) for tp in (1, 2, 4) for pp in (1, 2)]
    seen = [Observation(number, config, number, 1.0) for number, config in enumerate(configs, 1)]
    picked = pick_nearest(seen, configs[77])
    assert len(picked) == MAX_OBSERVATIONS
    assert [o.trial for o in picked] == sorted(o.trial for o in picked)
    steps = {o.trial: sum(value != configs[77][knob] for knob, value in o.config.items()) for o in seen}
    taken = {o.trial for o in picked}
    assert max(steps[n] for n in taken) <= min(steps[n] for n in steps if n not in taken)
    assert pick_nearest(seen[:50], configs[77]) == seen[:50]


def test_the_knob_that_decides_is_the_most_important():
    trials = [make_trial(n, 10.0 / 2 ** (n % 3) + 0.01 * (n % 2)) for n in range(1, 25)]
    trials = [replace(t, config={**t.config, "dp": 1}) for t in trials]
    shares = find_importance(trials)
    assert next(iter(shares)) == "tp"
    assert "dp" not in shares
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert find_importance(trials[:4]) == {}


def test_a_step_of_a_real_run_has_ranks_causes_and_lanes(tmp_path):
    recorded = TESTS / "recorded"
    shutil.copytree(recorded / "runs" / "measured", tmp_path / "measured")
    shutil.copytree(recorded / "gloo-ddp2", tmp_path / "measured" / "trials" / "0003" / "trace")
    run = load_run(tmp_path / "measured")
    step = read_step(run)
    assert set(step.seconds_by_rank) == {0, 1}
    assert all("compute" in parts for parts in step.seconds_by_rank.values())
    assert {lane.rank for lane in step.lanes if lane.spans_ms} == {0, 1}
    charts = {chart.name: chart for chart in draw_run(replace(gather_run(run), step=step))}
    assert charts["ranks"].title.startswith(f"Trial {step.trial}: one step by rank")
    assert {row["rank"] for row in charts["timeline"].spec["data"]["values"]} == {0, 1}
