"""After a pause of the worker, no node is judged too early."""

from __future__ import annotations

from paceline_server.worker.warm_up import WarmUp
from paceline_wire.batch import Batch

SECOND = 1_000_000_000


def batch(agent: str, packed_ns: int, *, overtakes: bool = False) -> Batch:
    return Batch(
        agent_id=agent, boot_id="boot", sequence=0, packed_ns=packed_ns, overtakes=overtakes
    )


def test_a_job_without_ranks_needs_no_warm_up() -> None:
    assert WarmUp(0, 6 * SECOND).is_done(set(), 0)


def test_warm_up_ends_with_a_fresh_batch_of_every_node() -> None:
    warm_up = WarmUp(100 * SECOND, 6 * SECOND)
    warm_up.receive(batch("a", 100 * SECOND), 100 * SECOND)
    assert not warm_up.is_done({"a", "b"}, 100 * SECOND)
    warm_up.receive(batch("b", 90 * SECOND), 101 * SECOND)  # backlog
    assert not warm_up.is_done({"a", "b"}, 101 * SECOND)
    warm_up.receive(batch("b", 101 * SECOND), 101 * SECOND)
    assert warm_up.is_done({"a", "b"}, 101 * SECOND)


def test_a_silent_node_is_judged_after_the_grace_period() -> None:
    warm_up = WarmUp(0, 6 * SECOND)
    assert not warm_up.is_done({"a"}, 6 * SECOND)
    assert warm_up.is_done({"a"}, 6 * SECOND + 1)


def test_batches_ahead_of_a_backlog_do_not_end_the_warm_up() -> None:
    """The events of its ranks are still an hour old, and would make the ranks look hung."""
    warm_up = WarmUp(0, 6 * SECOND)
    for second in range(30):
        warm_up.receive(batch("a", second * SECOND, overtakes=True), second * SECOND)
        assert not warm_up.is_done({"a"}, second * SECOND)
    warm_up.receive(batch("a", 30 * SECOND), 30 * SECOND)
    assert warm_up.is_done({"a"}, 30 * SECOND)


def test_a_node_that_never_catches_up_is_judged_after_a_minute() -> None:
    warm_up = WarmUp(0, 6 * SECOND)
    for second in range(66):
        warm_up.receive(batch("a", second * SECOND, overtakes=True), second * SECOND)
    assert warm_up.is_done({"a"}, 66 * SECOND)


def test_a_pause_starts_the_warm_up_again() -> None:
    warm_up = WarmUp(0, 6 * SECOND)
    assert warm_up.is_done(set(), 0)
    warm_up.begin_tick(SECOND)
    assert warm_up.is_done({"a"}, SECOND), "it stays done while ticks follow each other"
    warm_up.begin_tick(30 * SECOND)
    assert not warm_up.is_done({"a"}, 30 * SECOND)


def test_batches_from_before_the_pause_do_not_count() -> None:
    warm_up = WarmUp(100 * SECOND, 6 * SECOND)
    warm_up.receive(batch("a", 99 * SECOND), 99 * SECOND)
    assert not warm_up.is_done({"a"}, 100 * SECOND)


def test_ticks_that_are_all_slow_do_not_prolong_the_warm_up() -> None:
    """On a starved host each tick takes seconds, but failures must still be found."""
    warm_up = WarmUp(0, 6 * SECOND)
    done = []
    for tick in range(1, 20):
        warm_up.begin_tick(3 * tick * SECOND)
        done.append(warm_up.is_done({"a"}, 3 * tick * SECOND))
    assert all(done[5:])


def test_a_clock_that_is_set_back_does_not_prolong_the_warm_up() -> None:
    warm_up = WarmUp(1000 * SECOND, 6 * SECOND)
    warm_up.begin_tick(1001 * SECOND)
    warm_up.begin_tick(100 * SECOND)
    assert not warm_up.is_done({"a"}, 100 * SECOND)
    assert warm_up.is_done({"a"}, 107 * SECOND)
