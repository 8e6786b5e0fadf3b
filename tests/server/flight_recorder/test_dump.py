"""Peculiarities of the dump format, one by one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from paceline_server.flight_recorder import Dump, HangReport, analyze, dump_from

RANKS = range(3)


def entry(record: int, op: str, sequence: int, **other: Any) -> dict[str, Any]:
    is_p2p = op.startswith(("send", "recv")) or other.get("is_p2p", False)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "profiling_name": f"nccl:{op}",
        "collective_seq_id": 0 if is_p2p else sequence,
        "p2p_seq_id": sequence if is_p2p else 0,
        "is_p2p": is_p2p,
        "state": "scheduled",
        "retired": False,
        "time_created_ns": 1_000 + record,
        "input_sizes": [[8]],
        "output_sizes": [[8]],
        "input_dtypes": ["Float"],
        **other,
    }


def dump(rank: int, *entries: dict[str, Any], **other: Any) -> Dump:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(RANKS))}}
    document = {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": list(entries)}
    return dump_from(document | other, rank)


def status(enqueued: int, completed: int) -> dict[str, dict[str, int]]:
    return {
        "0": {
            "last_enqueued_collective": enqueued,
            "last_started_collective": -1,
            "last_completed_collective": completed,
        }
    }


def judged(*dumps: Dump) -> HangReport:
    return analyze({each.rank: each for each in dumps})


@pytest.mark.parametrize("version", [f"2.{minor}" for minor in range(4, 11)])
def test_every_version_from_2_4_on_is_read(version: str) -> None:
    found = judged(
        dump(0, entry(5, "all_reduce", 2), version=version),
        dump(1, entry(5, "all_reduce", 2), version=version),
        dump(2, version=version),
    )
    assert (found.culprits, found.kind) == ((2,), "host")


def test_gloo_says_retired_and_lists_no_group() -> None:
    gloo = {"profiling_name": "gloo:all_reduce"}
    nameless = {"": {"name": "", "desc": "", "ranks": "[]"}}
    done = entry(0, "all_reduce", 1, retired=True, **gloo)
    stuck = entry(1, "all_reduce", 2, **gloo)
    found = judged(
        # Its status counts every operation, so it is 9 although the sequence number is 1.
        dump(0, done, stuck, pg_config=nameless, pg_status=status(9, 8)),
        dump(1, done, pg_config=nameless, pg_status=status(9, 9)),
        dump(2, done, stuck, pg_config=nameless),
    )
    assert (found.culprits, found.kind) == ((1,), "host")
    assert found.process_group is not None
    assert found.process_group.ranks == (0, 1, 2)
    assert found.ranks[1].groups[0].last_enqueued == 1


def test_a_gap_in_the_ranks_is_a_rank_without_a_dump_where_groups_are_not_listed() -> None:
    stuck = entry(1, "all_reduce", 2, profiling_name="gloo:all_reduce")
    found = judged(dump(0, stuck, pg_config={}), dump(2, stuck, pg_config={}))
    assert (found.culprits, found.without_dump) == ((1,), (1,))


def test_ranks_after_the_last_dump_are_asked_for_where_groups_are_not_listed() -> None:
    stuck = entry(1, "all_reduce", 2, profiling_name="gloo:all_reduce")
    found = judged(dump(0, stuck, pg_config={}), dump(1, stuck, pg_config={}))
    assert (found.kind, found.is_certain) == ("device", False)
    assert "if the job has ranks after 1, which left no dump, check those" in found.notes[0]
    assert judged(dump(0, stuck), dump(1, stuck), dump(2, stuck)).notes == ()


def test_the_status_shows_who_has_finished_if_only_active_entries_are_left() -> None:
    """Rank 1 finished the broadcast, which is not in its dump; rank 2 never launched it."""
    stuck = entry(7, "broadcast", 4)
    found = judged(
        dump(0, stuck, pg_status=status(4, 3)),
        dump(1, entry(8, "all_reduce", 6), pg_status=status(6, 5)),
        dump(2, pg_status=status(3, 3)),
    )
    assert found.culprits == (2,)


def test_an_older_dump_of_a_running_job_is_not_a_hang() -> None:
    finished = entry(3, "all_reduce", 2, state="completed", retired=True)
    found = judged(dump(0, finished), dump(1, finished), dump(2, entry(3, "all_reduce", 2)))
    assert found.culprits == (2,)  # launched on all ranks, unfinished only on rank 2's device
    assert found.kind == "device"
    assert judged(dump(0, entry(3, "all_reduce", 2)), dump(1, finished), dump(2)).culprits == ()


def test_a_device_that_stopped_is_to_blame_and_not_its_host_which_stopped_later() -> None:
    """The dumps have active entries only: the others wait for rank 2 in all-reduce 5."""
    waiting = entry(9, "all_reduce", 5)
    stopped = [entry(3, "all_reduce", 3), entry(4, "all_reduce", 4)]
    found = judged(dump(0, waiting), dump(1, waiting), dump(2, *stopped))
    assert (found.culprits, found.kind, found.is_certain) == ((2,), "device", True)


def test_a_dump_that_is_older_than_the_others_shows_no_stopped_device() -> None:
    """Rank 2 must have launched all-reduce 4, which the others finished, after its dump."""
    done = [entry(n, "all_reduce", n, state="completed", retired=True) for n in (3, 4)]
    found = judged(dump(0, *done), dump(1, *done), dump(2, entry(3, "all_reduce", 3)))
    assert found.culprits == ()


def test_the_members_of_a_finished_batch_are_finished() -> None:
    send, receive = entry(1, "send 0->1", 4), entry(2, "recv 0<-1", 4)
    batch = entry(3, "coalesced", 4, is_p2p=True, state="completed")
    assert all(e.completed for e in dump(0, send, receive, batch).entries)
    # A dump of active entries lacks the entry of the batch itself.
    assert all(e.completed for e in dump(0, send, receive).entries)
    unfinished = dump(0, send, receive, batch | {"state": "scheduled"})
    assert [e.completed for e in unfinished.entries] == [False, False]


def test_a_ring_that_has_lost_its_oldest_entries_is_no_mismatch() -> None:
    """Rank 2 is far ahead, so its ring no longer contains the collective of the others."""
    done = [entry(100 + n, "all_reduce", 50 + n, state="completed") for n in range(5)]
    late = [entry(10 + n, "all_reduce", 5 + n) for n in range(2)]
    found = judged(dump(0, *late), dump(1), dump(2, *done))
    assert found.culprits == (1,)


def test_messages_are_joined_in_order_whatever_their_numbers() -> None:
    found = judged(
        dump(0, entry(1, "send 0->1", 9), entry(2, "recv 0<-1", 10)),
        dump(1, entry(1, "recv 1<-0", 3), entry(2, "recv 1<-2", 4)),
        dump(2),
    )
    # The first message of rank 1 was launched on both sides; then it waits for one from rank 2.
    assert found.first_missing is not None
    assert found.kind == "device"
    found = judged(dump(0, entry(2, "recv 0<-1", 10)), dump(1, entry(2, "recv 1<-2", 4)), dump(2))
    assert (found.culprits, found.kind) == ((2,), "host")
    assert found.first_missing is not None
    assert found.first_missing.op == "recv 1<-2"


def test_ranks_that_disagree_on_a_type_are_a_mismatch() -> None:
    half = entry(1, "all_reduce", 1, input_dtypes=["Half"])
    found = judged(
        dump(0, entry(1, "all_reduce", 1)), dump(1, half), dump(2, entry(1, "all_reduce", 1))
    )
    assert (found.culprits, found.kind) == ((1,), "mismatch")


def test_uneven_sizes_are_no_mismatch_where_they_are_meant() -> None:
    uneven = [
        dump(rank, entry(1, "all_to_all", 1, output_sizes=[[rank]], input_sizes=[[rank + 5]]))
        for rank in RANKS
    ]
    assert judged(*uneven).kind == "device"


def test_two_circles_of_receives_are_not_certain() -> None:
    found = judged(dump(0, entry(1, "recv 0<-1", 1)), dump(1, entry(1, "recv 1<-0", 1)), dump(2))
    assert (set(found.culprits), found.is_certain) == ({0, 1}, False)


def test_what_nccl_aborted_is_not_finished() -> None:
    aborted = entry(1, "all_reduce", 1, retired=True)
    found = judged(dump(0, aborted), dump(1, aborted), dump(2))
    assert (found.culprits, found.kind) == ((2,), "host")


def test_launches_far_ahead_of_a_stall_cost_no_more_than_their_number() -> None:
    def lines_run(launched: int) -> int:
        ahead = [entry(n, "all_reduce", 1 + n) for n in range(launched)]
        dumps = [dump(0, *ahead), dump(1, *ahead[: launched // 2]), dump(2, *ahead)]
        lines = 0

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            found = judged(*dumps)
        finally:
            sys.settrace(before)
        assert found.culprits == (1,)
        return lines

    assert lines_run(200) < 11 * lines_run(20)  # a thousandfold if the cost were cubic
