"""After a pause of our own, nobody is judged too early."""

from __future__ import annotations

from paceline_server.worker.warm_up import Settling
from paceline_wire.batch import Batch

SECOND = 1_000_000_000


def batch(agent: str, packed_ns: int, *, overtakes: bool = False) -> Batch:
    return Batch(
        agent_id=agent, boot_id="boot", sequence=0, packed_ns=packed_ns, overtakes=overtakes
    )


def test_a_job_without_ranks_is_settled_at_once() -> None:
    assert Settling(0, 6 * SECOND).settled(set(), 0)


def test_fresh_news_of_every_node_settles() -> None:
    settling = Settling(100 * SECOND, 6 * SECOND)
    settling.hear(batch("a", 100 * SECOND), 100 * SECOND)
    assert not settling.settled({"a", "b"}, 100 * SECOND)
    settling.hear(batch("b", 90 * SECOND), 101 * SECOND)  # backlog
    assert not settling.settled({"a", "b"}, 101 * SECOND)
    settling.hear(batch("b", 101 * SECOND), 101 * SECOND)
    assert settling.settled({"a", "b"}, 101 * SECOND)


def test_a_node_that_stays_silent_is_judged_after_its_grace() -> None:
    settling = Settling(0, 6 * SECOND)
    assert not settling.settled({"a"}, 6 * SECOND)
    assert settling.settled({"a"}, 6 * SECOND + 1)


def test_news_that_overtake_a_backlog_do_not_settle() -> None:
    """Its ranks' news are still those of an hour ago: judged by them, they would look stuck."""
    settling = Settling(0, 6 * SECOND)
    for second in range(30):
        settling.hear(batch("a", second * SECOND, overtakes=True), second * SECOND)
        assert not settling.settled({"a"}, second * SECOND)
    settling.hear(batch("a", 30 * SECOND), 30 * SECOND)
    assert settling.settled({"a"}, 30 * SECOND)


def test_a_node_that_never_gets_through_its_backlog_is_judged_all_the_same() -> None:
    settling = Settling(0, 6 * SECOND)
    for second in range(66):
        settling.hear(batch("a", second * SECOND, overtakes=True), second * SECOND)
    assert settling.settled({"a"}, 66 * SECOND)


def test_a_pause_begins_anew() -> None:
    settling = Settling(0, 6 * SECOND)
    assert settling.settled(set(), 0)
    settling.look(SECOND)
    assert settling.settled({"a"}, SECOND), "settled stays settled while we keep looking"
    settling.look(30 * SECOND)
    assert not settling.settled({"a"}, 30 * SECOND)


def test_what_came_before_the_pause_does_not_count() -> None:
    settling = Settling(100 * SECOND, 6 * SECOND)
    settling.hear(batch("a", 99 * SECOND), 99 * SECOND)
    assert not settling.settled({"a"}, 100 * SECOND)
