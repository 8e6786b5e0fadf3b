"""`python -m benchmarks`: its rows, and a failing benchmark that does not affect the others."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Result
from benchmarks.harness.recorded import check_recorded
from paceline_wire.spans import NONE_32, Op
from tests.one_rank import recorder

ROOT = Path(__file__).parents[2]


def run(
    *arguments: str, names: list[str] | None = None, limit_seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    source = "import sys; import benchmarks.__main__ as command\n"
    source += f"command.LIMIT_SECONDS = {limit_seconds}\n"
    if names is not None:
        source += f"command.names = lambda: {names!r}\n"
    source += f"sys.argv = ['benchmarks', *{list(arguments)!r}]; command.main()"
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=150
    )


@pytest.mark.parametrize(
    ("result", "ratio", "met"),
    [
        (Result("a", 2.0, "s", baseline=4.0, goal=3.0), 0.5, True),
        (Result("a", 2.0, "s", goal=1.0), None, False),
        (Result("a", 2.0, "records/s", goal=1.0, more_is_better=True), None, True),
        (Result("a", 2.0, "s"), None, None),
        (Result("a", 2.0, "s", goal=3.0, resolved=False), None, None),
    ],
)
def test_a_row_has_its_ratio_and_whether_its_goal_is_met(
    result: Result, ratio: float | None, met: bool | None
) -> None:
    row = result.row()
    assert list(row) == ["name", "value", "unit", "baseline", "goal", "ratio", "met"]
    assert (row["ratio"], row["met"]) == (ratio, met)


def test_a_failing_benchmark_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    finished = run("--json", str(target), names=["no_such_module", "wire_codec"])
    assert finished.returncode == 1
    assert "no_such_module failed: ModuleNotFoundError" in finished.stdout
    rows = json.loads(target.read_text())
    assert {row["unit"] for row in rows} == {"B", "records/CPU-s"}


def test_a_benchmark_that_takes_too_long_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # part of the options of the agent that it starts
    finished = run(names=["agent_cost"], limit_seconds=10.0)
    assert finished.returncode == 1
    assert "agent_cost failed: no result in 10.0 s" in finished.stdout
    assert processes_with(str(tmp_path).encode()) == []
    assert list(tmp_path.iterdir()) == []


def processes_with(word: bytes) -> list[bytes]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has just ended
            commands.append(path.read_bytes())
    return [command for command in commands if word in command]


def test_hooks_that_record_nothing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="recorded nothing"):
        check_recorded(str(tmp_path))
    written = recorder(tmp_path / "bench.ring")
    with pytest.raises(RuntimeError, match="recorded nothing"):
        check_recorded(str(tmp_path))
    written.write(Op.FORWARD, 1, NONE_32, 0, 0, 1, 10)
    check_recorded(str(tmp_path))


def test_an_unknown_name_is_refused_with_the_valid_names() -> None:
    finished = run("hooks_unit_cost")
    assert finished.returncode == 2
    assert "hooks_unit_costs" in finished.stderr


def test_every_module_is_a_benchmark() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "from benchmarks.__main__ import names; print(*names())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert {"hooks_unit_costs", "hooks_overhead", "wire_codec"} <= set(listed.stdout.split())


_ALONE = """
from unittest.mock import Mock

import torch

from benchmarks.harness.torch_alone import torch_alone
from paceline.torch_events import TorchEvents

names = ["recognition", "recorder", "checkpoints", "saves"]
events, parts = TorchEvents.get(), [Mock() for _ in names]
events.start(*parts)
with torch_alone():
    assert [getattr(events, name) for name in names] == [None] * 4
assert [getattr(events, name) for name in names] == parts
"""


def test_the_hooks_report_again_after_torch_ran_alone():
    ran = subprocess.run(
        [sys.executable, "-c", _ALONE], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert ran.returncode == 0, ran.stderr
