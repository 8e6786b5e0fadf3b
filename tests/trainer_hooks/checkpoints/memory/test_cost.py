"""The processor time that others lose to a thread of Paceline, from clocks of the host."""

from __future__ import annotations

import os
from pathlib import Path
from time import thread_time

import pytest

from paceline.checkpoints.memory import cost
from paceline.checkpoints.memory.cost import HostUse, Work, lost_seconds

OWN = 0.1  # seconds that the thread worked, on a host of four processors


@pytest.mark.parametrize(
    ("idle", "waited", "ranks", "lost"),
    [
        pytest.param(0.3, 0.0, "1", 0.0, id="others are idle"),
        pytest.param(0.2, 0.0, "1", 0.0, id="half of the cores are idle"),
        pytest.param(0.1, 0.0, "1", 0.2 * 0.05, id="half of the cores are shared"),
        pytest.param(0.0, 0.0, "1", 0.2 * 0.1, id="all cores are shared"),
        pytest.param(0.0, 0.0, "4", 0.0, id="only such threads work"),
        pytest.param(0.0, 0.0, "2", 0.2 * 0.1, id="two such threads, and two of the training"),
        pytest.param(0.0, 0.07, "1", 0.07, id="others wait"),
        pytest.param(0.0, 5.0, "1", 0.1, id="others wait for more than it"),
        pytest.param(0.28, 0.09, "1", 0.02, id="it waits itself, beside little else"),
        pytest.param(0.1, None, "1", 0.05, id="waits are not known"),
        pytest.param(None, None, "1", 0.1, id="nothing is known"),
        pytest.param(9.0, 0.0, "1", 0.0, id="a container's other clock"),
    ],
)
def test_a_thread_costs_what_others_lack_while_it_works(
    idle: float | None,
    waited: float | None,
    ranks: str,
    lost: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    before = HostUse(50.0, None if idle is None else 7.0, None if waited is None else 3.0)
    after = HostUse(
        50.1, None if idle is None else 7.0 + idle, None if waited is None else 3.0 + waited
    )
    assert lost_seconds(before, after, OWN) == pytest.approx(lost)


@pytest.mark.parametrize(("ranks", "lost_ms"), [("2", 0.5), ("8", 1.0)])
def test_a_time_too_short_for_the_idle_clock(
    ranks: str, lost_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something waits all the time, also for the threads of ranks beyond the processors."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    before, after = HostUse(50.0, 7.0, 3.0), HostUse(50.001, 7.01, 3.001)
    assert lost_seconds(before, after, 0.0005) == pytest.approx(lost_ms / 1000)


def test_nothing_is_lost_in_no_time() -> None:
    use = HostUse(50.0, 7.0, 3.0)
    assert lost_seconds(use, use, 0.0) == 0.0


def test_the_clocks_of_this_host_advance() -> None:
    """They are those of Linux: a thread that works for a while is seen by none as idle."""
    before, begin = HostUse.read(), thread_time()
    while thread_time() < begin + 0.05:
        pass
    after = HostUse.read()
    assert before.idle is not None
    assert after.idle is not None
    passed = after.now - before.now
    assert 0.0 <= after.idle - before.idle <= (os.cpu_count() or 1) * passed + 0.1
    assert 0.0 <= lost_seconds(before, after, 0.05) <= 0.05


def test_the_clocks_are_known_after_all_files_were_closed() -> None:
    HostUse.read()
    for path in (Path("/proc/uptime"), Path("/proc/pressure/cpu")):
        if path.exists():
            os.close(cost._opened(path))
    assert HostUse.read().idle is not None


def test_the_cost_of_work() -> None:
    assert 0.0 <= Work().lost_seconds() < 0.1


@pytest.mark.parametrize("content", [None, "", "nothing known\n"])
def test_files_that_are_missing_or_different(content: str | None, tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    if content is not None:
        (tmp_path / "uptime").write_text(content)
        (tmp_path / "pressure/cpu").write_text(content)
    assert HostUse.read(tmp_path)[1:] == (None, None)


def test_pressure_is_read_in_microseconds(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "uptime").write_text("3810.55 6493.33\n")
    some = "some avg10=1.26 avg60=5.24 avg300=2.74 total=253685012\n"
    (tmp_path / "pressure/cpu").write_text(some + "full avg10=0.00 total=9\n")
    assert HostUse.read(tmp_path)[1:] == (6493.33, 253.685012)
