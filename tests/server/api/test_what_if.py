"""What-if results of the API and the CLI, from batches of agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace
from recorded_job import SLOW_RANK, STEPS, TOPOLOGY, Recorded
from simulated_finding import SUMMARY, open_incident
from simulated_job import JOB
from sqlalchemy import delete, func, select

from paceline_server.api import what_if
from paceline_server.api.recorded import recorded_steps
from paceline_server.api.what_if import WhatIfCache
from paceline_server.engine.engine import Engine
from paceline_server.store import kept_logs
from paceline_server.store.kept_logs import keep_last_steps, prune_kept_logs
from paceline_server.store.log import newest_log_id
from paceline_server.store.models import (
    EngineMemoryRow,
    GenerationRow,
    HotLogRow,
    JobRow,
    KeptLogRow,
)
from paceline_wire.batch import decode

# test_trace.py covers both databases
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

PATH = f"/api/v1/jobs/{JOB}/what-if"


def asked(recorded: Recorded, **parameters: Any) -> dict[str, Any]:
    answer = recorded.server.client.get(PATH, params=parameters)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_slow_rank_is_named_with_the_gain_of_fixing_it(recorded: Recorded) -> None:
    found = asked(recorded)
    assert (found["first_step"], found["last_step"]) == (STEPS - 8, STEPS - 1)
    assert found["verdict"]["kind"] == "slow_worker"
    assert found["verdict"]["target"] == f"rank {SLOW_RANK}"
    assert found["slowdown"] == pytest.approx(
        found["step_seconds"] / found["ideal_step_seconds"], rel=1e-3
    )
    best = found["fixes"][0]
    # The worker consists of ranks 4 and 5, but only rank 5 is slow.
    assert (best["kind"], best["target"]) == ("rank", f"rank {SLOW_RANK}")
    assert 1.1 < best["speedup"] < 1.6
    assert f"fixing it gives {best['speedup']:.2f}x" in found["verdict"]["text"]
    assert len(found["slowdown_by_step"]) == 8
    assert set(found["slowdown_by_worker"]) == {"0", "2", "4", "6"}
    assert max(found["slowdown_by_worker"], key=found["slowdown_by_worker"].get) == "4"
    assert found["m_w"] > 0.5


def test_other_schedule_is_listed_with_gain_and_cost(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        job = session.get_one(JobRow, JOB)
        job.spec = replace(job.spec, metadata={"schedule": "gpipe"})
    advice = asked(recorded)["advice"]
    other = next(each for each in advice if each["schedule"] == "1f1b")
    assert other["microbatches"] == 4
    assert other["memory_ratio"] == pytest.approx(0.5)
    finer = next(each for each in advice if each["microbatches"] == 8)
    assert finer["speedup"] > 1.02
    assert finer["bubble_ratio"] < finer["bubble_ratio_now"]
    assert finer["memory_ratio"] == pytest.approx(1.0)


def test_the_cli_says_the_same(recorded: Recorded) -> None:
    shown = recorded.paceline("analyze", JOB, "--json", "--steps", "8")
    assert shown.exit_code == 0, shown.output
    found = asked(recorded)
    assert json.loads(shown.stdout) == found
    report = recorded.paceline("analyze", JOB)
    assert report.exit_code == 0, report.output
    assert found["verdict"]["text"].split(";")[0] in report.output.replace("\n", " ")
    for text in (f"rank {SLOW_RANK}", "ranks 4-5 (dp 0, stage 1)", "backward-compute", "x as fast"):
        assert text in report.output


def fault_of(recorded: Recorded, onset_step: int, stage: int = 1) -> None:
    row = open_incident()
    found = replace(row.view.finding, generation=0, onset_step=onset_step, stage=stage)
    row.view = replace(row.view, finding=found)
    with recorded.server.program.database.write() as session:
        session.add(row)


def test_steps_from_before_the_onset_of_a_fault_are_left_out(recorded: Recorded) -> None:
    fault_of(recorded, onset_step=STEPS - 4)
    found = asked(recorded)
    assert (found["first_step"], found["last_step"]) == (STEPS - 4, STEPS - 1)
    assert found["verdict"]["kind"] == "slow_worker"


@pytest.mark.parametrize("is_known", [False, True])
def test_right_after_an_onset_there_is_no_advice(recorded: Recorded, is_known: bool) -> None:
    """This holds whether or not the fault is known, because the detectors need some steps to find
    it."""
    recorded.job.faults.slow = dict.fromkeys((4, 5, 6, 7), 3.0)
    for step in (STEPS, STEPS + 1):
        recorded.play(step)
    if is_known:
        fault_of(recorded, onset_step=STEPS)
    found = asked(recorded)
    assert found["verdict"]["kind"] == "unknown"
    assert f"changed its speed at step {STEPS}" in found["verdict"]["text"]
    assert found["advice"] == []


def test_one_stall_at_the_end_is_left_out(recorded: Recorded) -> None:
    before = asked(recorded)
    recorded.job.host_factor = 2.0
    recorded.play(STEPS)
    found = asked(recorded, steps=9)
    assert (found["first_step"], found["last_step"]) == (STEPS - 8, STEPS - 1)
    assert found["step_seconds"] == before["step_seconds"]


def test_no_layers_are_moved_away_from_a_stage_that_is_throttled(recorded: Recorded) -> None:
    recorded.job.faults.slow = dict.fromkeys((4, 5, 6, 7), 3.0)
    for step in range(STEPS, STEPS + 8):
        recorded.play(step)
    assert "move layers" in asked(recorded)["verdict"]["text"]
    fault_of(recorded, onset_step=STEPS)
    verdict = asked(recorded)["verdict"]
    assert (verdict["kind"], verdict["target"]) == ("slow_worker", "stage 1")
    assert verdict["text"].endswith(SUMMARY)


def test_analysis_without_steps_says_when_it_is_available(run_server: Callable[..., Any]) -> None:
    recorded = Recorded(run_server(role="api"), steps=0)
    found = asked(recorded)
    assert found["slowdown"] is None
    assert found["verdict"] == {"kind": "unknown", "target": None, "text": what_if.NO_STEP}
    shown = recorded.paceline("analyze", JOB)
    assert shown.exit_code == 1
    assert what_if.NO_STEP in shown.output


def test_pruned_steps_are_reported(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        session.execute(delete(HotLogRow))
    assert asked(recorded)["verdict"]["text"] == what_if.NOTHING_STORED


def end(recorded: Recorded, prunes: float = 1.0) -> None:
    """End the job, and prune this share of its batches."""
    with recorded.server.program.database.write() as session:
        session.get_one(JobRow, JOB).state = "finished"
        keep_last_steps(session, JOB, 0, 1)
        session.execute(delete(HotLogRow).where(HotLogRow.id <= prunes * newest_log_id(session)))


@pytest.mark.parametrize(
    ("most_bytes", "first_step"), [(1.0, STEPS - 8), (0.6, STEPS - 5), (0.0, None)]
)
def test_a_job_that_has_ended_is_analyzed_after_its_batches_were_pruned(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, most_bytes: float, first_step: int | None
) -> None:
    """`most_bytes`: of the size of all twelve steps."""
    with recorded.server.program.database.read() as session:
        size = session.scalar(select(func.sum(HotLogRow.size_bytes)))
    assert size is not None
    monkeypatch.setattr(kept_logs, "MOST_BYTES", most_bytes * size)
    monkeypatch.setattr(kept_logs, "MARGIN_NS", 500_000_000)  # steps take 430 ms
    end(recorded, prunes=0.8 if most_bytes else 1.0)
    found = asked(recorded)
    assert found["first_step"] == first_step, found["verdict"]
    if first_step is None:
        assert found["verdict"]["text"] == what_if.NOTHING_STORED
        return
    assert found["verdict"]["target"] == f"rank {SLOW_RANK}"
    trace = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace")
    assert trace.status_code == 200
    with recorded.server.program.database.write() as session:
        prune_kept_logs(session, most_bytes=1)
        session.execute(delete(HotLogRow))
    assert asked(recorded, steps=7)["verdict"]["text"] == what_if.NOTHING_STORED


def test_groups_are_known_after_the_batches_that_define_them_were_pruned(
    recorded: Recorded,
) -> None:
    def groups() -> list[dict[int, tuple[int, ...]]]:
        with recorded.server.program.database.read() as session:
            found = recorded_steps(session, session.get_one(JobRow, JOB), 3)
        assert found is not None
        return [dict(timing.groups) for timing in found.timings]

    before = groups()
    engine = Engine(JOB)
    with recorded.server.program.database.write() as session:
        engine.place(session.get_one(GenerationRow, (JOB, 0)).placement)
        for entry in session.scalars(select(HotLogRow).order_by(HotLogRow.id)):
            engine.feed(decode(entry.payload), entry.received_ns)
        session.add(EngineMemoryRow(job_id=JOB, memory=engine.memory(), cursor=0))
        session.execute(delete(HotLogRow).where(HotLogRow.id <= newest_log_id(session) // 3))
    assert all(before)
    assert groups() == before


def test_batches_of_an_earlier_generation_do_not_describe_a_later_one(recorded: Recorded) -> None:
    end(recorded)
    with recorded.server.program.database.write() as session:
        session.get_one(KeptLogRow, JOB).generation = 7
    assert asked(recorded)["verdict"]["text"] == what_if.NOTHING_STORED


def test_steps_that_cannot_be_replayed_are_reported(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_strange_ranks(*arguments: Any) -> Any:
        found = recorded_steps(*arguments)
        assert found is not None
        for timing in found.timings:
            timing.compute.rank[:] = -1
        return found

    monkeypatch.setattr(what_if, "recorded_steps", of_strange_ranks)
    assert asked(recorded)["verdict"]["text"] == what_if.NO_REPLAY


def test_unknown_job_is_reported(recorded: Recorded) -> None:
    for job in ("nope", "a%00b"):
        assert recorded.server.client.get(f"/api/v1/jobs/{job}/what-if").status_code == 404
    assert "There is no job 'nope'" in recorded.paceline("analyze", "nope").output


def test_analysis_is_cached_in_proportion_to_its_cost(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of clients and any step time."""
    made = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments[2])
        return recorded_steps(*arguments)

    monkeypatch.setattr(what_if, "recorded_steps", counted)
    now = [0.0]
    answers = WhatIfCache(lambda: now[0])
    database = recorded.server.program.database
    first = answers.get(database, JOB, 8)
    assert first.last_step == STEPS - 1
    assert answers.get(database, JOB, 8) is first
    recorded.play(STEPS)
    now[0] = what_if.LEAST_SECONDS - 0.1
    assert answers.get(database, JOB, 8) is first
    now[0] = 1e6
    later = answers.get(database, JOB, 8)
    assert later.last_step == STEPS
    now[0] = 2e6
    assert answers.get(database, JOB, 8) is later  # nothing new, whatever the age
    assert made == [8, 8]


def test_analysis_from_before_an_incident_is_not_reused(recorded: Recorded) -> None:
    answers = WhatIfCache(lambda: 0.0)
    database = recorded.server.program.database
    assert answers.get(database, JOB, 8).last_step == STEPS - 1
    recorded.play(STEPS)
    with database.write() as session:
        session.add(open_incident())
    answer = answers.get(database, JOB, 8)
    assert answer.last_step == STEPS
    recorded.play(STEPS + 1)
    assert answers.get(database, JOB, 8) is answer


def test_fewer_steps_are_replayed_for_a_large_job(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if, "MOST_RANK_STEPS", 3 * TOPOLOGY.world_size)
    assert asked(recorded)["first_step"] == STEPS - 3
    monkeypatch.setattr(what_if, "MOST_RANK_STEPS", 1)
    assert asked(recorded, steps=2)["first_step"] == STEPS - 1


def test_requests_that_wait_for_an_analysis_do_not_delay_others(recorded: Recorded) -> None:
    client, found = recorded.server.client, recorded.server.app.state.parts.what_ifs
    with ThreadPoolExecutor(61) as pool:
        with found._computing:  # as during the analysis of a large job
            waiting = [pool.submit(client.get, PATH) for _ in range(60)]
            assert pool.submit(client.get, "/api/v1/jobs").result(30).status_code == 200
            assert not any(one.done() for one in waiting)
        assert {one.result(60).status_code for one in waiting} == {200}
