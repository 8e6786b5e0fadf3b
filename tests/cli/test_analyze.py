"""`paceline analyze` on a recorded trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline_cli.main import main

DATA = Path(__file__).parents[1] / "server" / "whatif" / "data"
TRACE = str(DATA / "trace-ST.parquet")
META = str(DATA / "meta-ST.yaml")


def analyze(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["analyze", *arguments])


def test_json_has_the_documented_keys() -> None:
    shown = json.loads(analyze(TRACE, "--meta", META, "--json").stdout)
    assert list(shown) == [
        "step_seconds",
        "ideal_step_seconds",
        "slowdown",
        "slowdown_by_step",
        "slowdown_by_optype",
        "slowdown_by_dp_rank",
        "slowdown_by_stage",
        "slowdown_by_worker",
        "m_s",
        "m_w",
        "launch_slowdown",
        "slowest_workers",
        "verdict",
    ]
    assert list(shown["verdict"]) == ["kind", "target", "text"]
    assert shown["slowdown_by_stage"]["3"] == pytest.approx(1.2322559, abs=1e-6)


def test_the_report_begins_with_the_verdict() -> None:
    lines = analyze(TRACE, "--meta", META).stdout.splitlines()
    assert lines[0].startswith("Stragglers cost 15.2% of step time; the last stage (stage 3)")
    assert any("rank 7 (dp 1, stage 3)" in line for line in lines)


def test_without_metadata_the_report_names_the_source_of_the_sizes() -> None:
    assert analyze(TRACE, "--json").stderr == (
        "No --meta, so the sizes are the trace's: 2 dp ranks, 4 stages.\n"
    )


def test_the_timeline_is_the_ideal_step(tmp_path: Path) -> None:
    out = tmp_path / "ideal.json"
    assert analyze(TRACE, "--timeline", str(out)).exit_code == 0
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    end_microseconds = max(event["ts"] + event["dur"] for event in events)
    assert end_microseconds == pytest.approx(1.8432958e6, rel=1e-6)
    computes = {event["dur"] for event in events if event["name"] == "forward-compute"}
    assert max(computes) == pytest.approx(min(computes))
    for event in events:  # no operation runs before those it depends on
        assert event["ts"] >= 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a TRACE"),
        (["nowhere.parquet"], "there is no file nowhere.parquet"),
        ([META], "is not Parquet"),
        ([TRACE, "--meta", TRACE], "is not YAML"),
        ([TRACE, "--timeline", "/dev/full"], "cannot write /dev/full"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(arguments: list[str], sentence: str) -> None:
    result = analyze(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_the_name_of_a_job_may_have_a_dot() -> None:
    """The id of an external job is the name of its launcher, such as `llama.7b`."""
    result = analyze("llama.7b", "--server", "http://127.0.0.1:9")
    assert "no answer from http://127.0.0.1:9" in result.stderr


def test_analyze_imports_no_server_or_client_packages_that_it_does_not_need() -> None:
    code = (
        "import sys; from paceline_cli.main import run_main\n"
        f"run_main(['analyze', {TRACE!r}, '--json'], standalone_mode=False)\n"
        "print(sorted({'fastapi', 'httpx', 'sqlalchemy', 'pydantic', 'pandas', 'torch'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.splitlines()[-1] == "[]"
