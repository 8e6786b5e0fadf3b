"""How long threads run or wait for a CPU, from what kernels with and without `schedstat` show."""

from __future__ import annotations

import os
import threading
import time

import pytest

from paceline_agent.collect.scheduling import (
    Runnable,
    is_starved,
    parse,
    process_runnable,
    thread_runnable,
)

_TICKS = os.sysconf("SC_CLK_TCK")


def stat(state: str, user_ticks: int, system_ticks: int) -> bytes:
    return f"7 (a) b) c) {state} 1 7 7 0 -1 0 0 0 0 0 {user_ticks} {system_ticks} 0 0 20 0".encode()


def test_running_and_waiting_count() -> None:
    assert parse(stat("S", 1, 1), b"2000000000 500000000 9\n") == Runnable(2.5, False)
    assert parse(stat("R", 0, 0), b"1 1 9\n").is_now


@pytest.mark.parametrize("schedstat", [b"", b"0 0 0\n"])
def test_without_schedstat_the_cpu_time_counts(schedstat: bytes) -> None:
    before, after = (parse(stat("S", ticks, _TICKS), schedstat) for ticks in (0, _TICKS))
    assert (before.seconds, after.seconds) == (1.0, 2.0)
    assert is_starved(before, after, 2.0)
    assert not is_starved(before, before, 2.0), "it sleeps in the driver"
    assert is_starved(before, parse(stat("R", 0, _TICKS), schedstat), 2.0), "it waits for a CPU"


def test_a_thread_that_ended_is_unknown_and_one_of_several_ends() -> None:
    ended = threading.Thread(target=time.sleep, args=(0,))
    ended.start()
    native_id = ended.native_id
    ended.join()
    while native_id is not None and os.path.exists(f"/proc/self/task/{native_id}"):
        time.sleep(0.01)
    assert thread_runnable(native_id or 0) is None
    assert not is_starved(None, None, 1.0)
    assert is_starved(Runnable(5.0, False), Runnable(3.0, False), 1.0), "others run on"
    assert process_runnable(os.getpid()) is not None
