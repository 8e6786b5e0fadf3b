"""The node's clock is set while an agent runs: its timestamps continue without a jump."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from paceline_agent import clock
from paceline_agent.clock import until_next
from paceline_agent.forward import server_clock
from paceline_agent.forward.server_clock import ServerClock
from paceline_agent.rings.clock_offset import ClockOffset

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize("step_ns", [HOUR_NS, -HOUR_NS])
def test_setting_the_clock_reorders_nothing_and_is_reported(
    step_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, before, real = ClockOffset(), clock.timeline_ns(), time.time_ns
    offset_before = offset.read_ns()
    monkeypatch.setattr(time, "time_ns", lambda: real() + step_ns)
    assert 0 <= clock.timeline_ns() - before < HOUR_NS // 2
    assert offset.read_ns() == offset_before, "spans stay where they were"
    assert abs(clock.stepped_ns() - step_ns) < 10**9


def test_the_timeline_starts_at_the_realtime_clock() -> None:
    program = "import time\nfrom paceline_agent.clock import timeline_ns\n"
    program += "print(time.time_ns(), timeline_ns(), time.time_ns())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    before, timeline, after = map(int, done.stdout.split())
    assert before - 10**7 < timeline < after + 10**7


def test_the_offset_to_the_server_comes_from_the_fastest_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 10**18
    monkeypatch.setattr(server_clock, "timeline_ns", lambda: now_ns)
    server = ServerClock()
    assert server.offset_seconds is None
    for delay_ns in (40_000_000, 2_000_000, 900_000_000):
        server.add_ping(now_ns + HOUR_NS - delay_ns)
    assert server.offset_seconds == pytest.approx(3600 - 0.002)


def test_a_suspension_discards_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**18
    monkeypatch.setattr(server_clock, "timeline_ns", lambda: now_ns)
    server = ServerClock()
    for delay_ns in (0, 2_000_000, 600 * 10**9 + 3_000_000, 600 * 10**9 + 1_000_000):
        server.add_ping(now_ns - delay_ns)
    assert server.offset_seconds == pytest.approx(-600.001)


def test_timers_due_at_about_the_same_time_fire_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (100.21, 100.22, 100.69):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        assert now + until_next(0.5, 0.2) == pytest.approx(100.7)
    assert 0 < until_next(0.5) <= 0.5
