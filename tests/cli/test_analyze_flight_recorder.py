"""`paceline analyze --flight-recorder` on a recorded hang."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline_cli.main import main

ARCHIVE = Path(__file__).parents[1] / "server/flight_recorder/data/lock_gil_1st.tar.gz"


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    subprocess.run(["tar", "-xf", ARCHIVE, "-C", tmp_path], check=True)
    return tmp_path / "lock_gil_1st"


def analyze(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["analyze", *map(str, arguments)])


def test_json_has_the_documented_keys(dumps: Path) -> None:
    result = analyze("--flight-recorder", dumps, "--json")
    shown = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(shown) == [
        "culprits",
        "kind",
        "is_certain",
        "process_group",
        "first_missing",
        "verdict",
        "ranks",
        "without_dump",
        "notes",
    ]
    assert (shown["culprits"], shown["kind"]) == ([9, 14], "host")
    assert shown["first_missing"]["op"] == "all_to_all"
    assert shown["first_missing"]["sequence_id"] == 45265
    assert len(shown["ranks"]) == 16
    assert shown["ranks"][8]["waits_for"] == [9, 14]


def test_the_report_begins_with_the_verdict(dumps: Path) -> None:
    result = analyze("--flight-recorder", dumps)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Ranks 9, 14 stopped on the host before launching all_to_all")
    assert sum(line.split()[1:2] == ["culprit"] for line in lines) == 2
    assert result.stderr == "Note: fault_injection.log: ignored: not a dump of a rank.\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "contains no Flight Recorder dump"),
        (b"cos\nsystem\n(S'true'\ntR.", "_dump_0 imports a global"),
        (b"\x80\x02}", "_dump_0 is not a whole pickle"),
    ],
)
def test_bad_dumps_are_one_sentence_and_exit_2(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "_dump_0").write_bytes(content)
    result = analyze("--flight-recorder", tmp_path)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_dumps_and_a_trace_are_not_analyzed_together(dumps: Path) -> None:
    result = analyze("trace.parquet", "--flight-recorder", dumps)
    assert result.exit_code == 2
    assert "takes no TRACE" in result.stderr
