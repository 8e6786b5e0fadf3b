"""A job's last steps as a trace: sent by agents, exported by a running server, and analyzed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import CliRunner
from recorded_job import SLOW_RANK, STEPS, Recorded
from simulated_job import JOB
from sqlalchemy import delete, select

from paceline_cli.main import main
from paceline_server.store.models import HotLogRow


def analyzed(recorded: Recorded) -> dict[str, Any]:
    shown = recorded.paceline("analyze", JOB, "--json")
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def test_the_trace_holds_the_operations_of_the_last_steps(recorded: Recorded) -> None:
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace", params={"steps": 3})
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert json.loads(answer.headers["Paceline-Sizes"])["world_size"] == 8
    table = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pydict()
    assert set(table["step"]) == {STEPS - 3, STEPS - 2, STEPS - 1}
    forwards = [
        row
        for row in zip(table["optype"], table["step"], table["rank"], table["mb_id"], strict=True)
        if row[:2] == ("forward-compute", STEPS - 1)
    ]
    # One per worker and microbatch; a worker is recorded as the lowest of its tp ranks.
    assert len(forwards) == len(set(forwards)) == 2 * 2 * 4
    assert {row[2] for row in forwards} == {0, 2, 4, 6}


@pytest.mark.any_database
def test_export_agrees_with_the_server(recorded: Recorded, tmp_path: Path) -> None:
    written = recorded.paceline("jobs", "export", JOB, "-o", str(tmp_path / "trace.parquet"))
    assert written.exit_code == 0, written.output
    by_file = CliRunner().invoke(
        main,
        ["analyze", str(tmp_path / "trace.parquet"), "--json", "--meta", f"{tmp_path}/trace.yaml"],
    )
    assert by_file.exit_code == 0, by_file.output
    exported, served = json.loads(by_file.stdout), analyzed(recorded)
    # In a trace the lowest rank represents its tensor-parallel peers.
    assert exported["verdict"]["target"] == "rank 4"
    assert served["verdict"]["target"] == f"rank {SLOW_RANK}"
    assert exported["slowest_workers"] == served["slowest_workers"]
    # Launch delays are ignored in a trace, and added to the next operation in a running job.
    for key in ("slowdown", "step_seconds", "ideal_step_seconds", "m_s", "m_w"):
        assert exported[key] == pytest.approx(served[key], abs=0.02)
    for key in ("stage", "dp_rank", "worker"):
        found, expected = exported[f"slowdown_by_{key}"], served[f"slowdown_by_{key}"]
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.any_database
def test_the_ideal_step_of_a_job_is_written_for_perfetto(
    recorded: Recorded, tmp_path: Path
) -> None:
    shown = recorded.paceline("analyze", JOB, "--timeline", str(tmp_path / "ideal.json"))
    assert shown.exit_code == 0, shown.output
    assert json.loads((tmp_path / "ideal.json").read_text())["traceEvents"]


@pytest.mark.any_database
def test_job_without_steps_has_no_trace(run_server: Callable[..., Any]) -> None:
    recorded = Recorded(run_server(role="api"), steps=0)
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace")
    assert answer.status_code == 409
    assert "No step" in answer.json()["detail"]
    shown = recorded.paceline("jobs", "export", JOB, "-o", "trace.parquet")
    assert shown.exit_code == 1
    assert "No step of the current generation has finished yet" in shown.output


@pytest.mark.any_database
def test_unknown_job_is_reported(recorded: Recorded) -> None:
    assert recorded.server.client.get("/api/v1/jobs/nope/trace").status_code == 404


def test_pruned_steps_are_reported(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        session.execute(delete(HotLogRow))
    answer = recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace")
    assert answer.status_code == 409
    assert "Too few of the last steps are stored" in answer.json()["detail"]


@pytest.mark.any_database
def test_damaged_batch_affects_only_itself(recorded: Recorded) -> None:
    with recorded.server.program.database.write() as session:
        last = session.scalars(select(HotLogRow).order_by(HotLogRow.id.desc()).limit(1)).one()
        last.payload = b"no batch"
    assert recorded.server.client.get(f"/api/v1/jobs/{JOB}/trace").status_code == 200
