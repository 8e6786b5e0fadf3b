"""Waits in collectives and transfers, without relying on clocks where possible."""

import numpy as np

from paceline_server.steps.columns import FIELDS, Spans, concatenate
from paceline_server.steps.groups import Groups
from paceline_server.steps.waits import CommunicationTimes, communication
from paceline_wire.ring import GroupDefinition
from paceline_wire.spans import Flag, Op


def spans(*rows: dict[str, int]) -> Spans:
    table = np.zeros((FIELDS, len(rows)), dtype=np.int64)
    for column, row in enumerate(rows):
        table[:, column] = [
            0,
            column,
            row["op"],
            row.get("group", 0),
            -1,
            row.get("flags", 0),
            0,
            -1,
            row.get("peer", -1),
            row.get("bytes", 0),
            row.get("sequence", 1),
            row.get("start", 0),
            row["duration"],
        ]
    return Spans(table)


def of_all(ranks: dict[int, Spans]) -> Spans:
    for rank, each in ranks.items():
        each.rank[:] = rank
    return concatenate(list(ranks.values()))


def met(ranks: dict[int, Spans], known: Groups) -> CommunicationTimes:
    return communication(of_all(ranks), known)


def waits_ns(ranks: dict[int, Spans], known: Groups) -> dict[int, np.ndarray]:
    waits = met(ranks, known).wait_ns
    owner = of_all(ranks).rank
    return {rank: waits[owner == rank] for rank in ranks}


def groups(*local_ids: int) -> Groups:
    """Return groups in which ranks 0 and 1 form "tp", each with its own local id."""
    known = Groups(4)
    for rank, local_id in enumerate(local_ids):
        known.add(rank, GroupDefinition(local_id, "tp", [0, 1], "tp"))
    return known


def test_the_last_rank_to_arrive_does_not_wait_whatever_the_clocks_say():
    skewed = 7_000_000_000
    ranks = {
        0: spans({"op": Op.ALL_REDUCE, "group": 3, "start": 100, "duration": 50}),
        1: spans({"op": Op.ALL_REDUCE, "group": 9, "start": skewed, "duration": 20}),
    }
    waits = waits_ns(ranks, groups(3, 9))
    assert (waits[0].tolist(), waits[1].tolist()) == ([30], [0])


def test_all_to_alls_of_which_ranks_receive_different_sizes_are_routed():
    routed, even = ({"op": Op.ALL_TO_ALL, "sequence": at, "duration": 9} for at in (1, 2))
    reduced = {"op": Op.ALL_REDUCE, "sequence": 3, "duration": 9}
    ranks = {
        rank: spans(
            {**routed, "bytes": size, "flags": Flag.ASYNC},
            {**routed, "bytes": size, "flags": Flag.WAIT},
            {**even, "bytes": 50},
            {**reduced, "bytes": size},
        )
        for rank, size in enumerate((10, 90))
    }
    found = met(ranks, groups(0, 0)).routed
    assert of_all(ranks).bytes[found].tolist() == [10, 90]


def test_groups_of_the_same_name_with_other_members_are_not_mixed():
    known = groups(1, 1)
    for rank in (2, 3):
        known.add(rank, GroupDefinition(1, "tp", [2, 3], "tp"))
    ranks = {
        rank: spans({"op": Op.ALL_REDUCE, "group": 1, "duration": duration})
        for rank, duration in enumerate((50, 20, 500, 400))
    }
    waits = waits_ns(ranks, known)
    assert [waits[rank][0] for rank in range(4)] == [30, 0, 100, 0]


def test_a_collective_of_an_undefined_group_or_without_its_peer_has_no_wait():
    ranks = {
        0: spans(
            {"op": Op.ALL_REDUCE, "group": 77, "duration": 50},
            {"op": Op.ALL_REDUCE, "group": 3, "duration": 50},
        ),
        1: spans({"op": Op.FORWARD, "duration": 50}),
    }
    assert waits_ns(ranks, groups(3, 9))[0].tolist() == [0, 0]


def test_the_host_waits_for_an_async_collective_only_beyond_its_transfer():
    ranks = {
        0: spans(
            {"op": Op.ALL_REDUCE, "group": 3, "duration": 80, "flags": Flag.ASYNC},
            {"op": Op.ALL_REDUCE, "group": 3, "duration": 40, "flags": Flag.WAIT},
        ),
        1: spans({"op": Op.ALL_REDUCE, "group": 9, "duration": 10}),
    }
    assert waits_ns(ranks, groups(3, 9))[0].tolist() == [70, 30]


def test_a_receive_waits_until_its_send_begins():
    ranks = {
        0: spans({"op": Op.FORWARD_SEND, "peer": 1, "start": 140, "duration": 5, "flags": 1}),
        1: spans({"op": Op.FORWARD_RECV, "peer": 0, "start": 100, "duration": 50}),
    }
    assert waits_ns(ranks, Groups(2))[1].tolist() == [40]


def test_skew_never_makes_a_wait_longer_than_the_receive_or_negative():
    for start, expected in ((10**12, 50), (0, 0)):
        ranks = {
            0: spans({"op": Op.SEND, "peer": 1, "start": start, "duration": 5}),
            1: spans({"op": Op.RECV, "peer": 0, "start": 100, "duration": 50}),
        }
        assert waits_ns(ranks, Groups(2))[1].tolist() == [expected]


def test_a_receive_whose_send_was_lost_is_all_wait():
    ranks = {1: spans({"op": Op.RECV, "peer": 0, "start": 100, "duration": 50})}
    assert waits_ns(ranks, Groups(2))[1].tolist() == [50]


def transfer_seconds(send: dict[str, int], *receive: dict[str, int]) -> list[float]:
    ranks = {
        0: spans({"op": Op.FORWARD_SEND, "peer": 1, **send}),
        1: spans(*({"op": Op.FORWARD_RECV, "peer": 0, **one} for one in receive)),
    }
    return (met(ranks, Groups(2)).transfers.transfer_seconds * 1e9).round().tolist()


def test_a_transfer_lasts_as_long_as_the_last_rank_was_in_it():
    assert transfer_seconds({"start": 0, "duration": 500}, {"start": 460, "duration": 40}) == [40]
    assert transfer_seconds({"start": 460, "duration": 30}, {"start": 0, "duration": 500}) == [30]
    skewed = 10**12
    assert transfer_seconds({"start": skewed, "duration": 9}, {"start": 0, "duration": 50}) == [9]


def test_an_async_send_with_a_late_wait_lasts_until_the_receive_ends():
    send = {"start": 100, "duration": 9000, "flags": Flag.ASYNC}
    assert transfer_seconds(send, {"start": 20, "duration": 95}) == [15]
    assert transfer_seconds(send, {"start": 150, "duration": 7}) == [7]
    late_clock = {**send, "start": 10**12}
    assert transfer_seconds(late_clock, {"start": 20, "duration": 95}) == [0]


def test_a_send_blocks_its_sender_while_the_host_is_in_it():
    launched = {"start": 100, "duration": 900, "flags": Flag.ASYNC}
    waited = {"start": 300, "duration": 50, "flags": Flag.WAIT}
    for sends, end_ns in (
        ([{"start": 100, "duration": 400}], 500),
        ([launched], 100),
        ([launched, waited], 350),
    ):
        ranks = {
            0: spans(*({"op": Op.FORWARD_SEND, "peer": 1, **one} for one in sends)),
            1: spans({"op": Op.FORWARD_RECV, "peer": 0, "start": 90, "duration": 60}),
        }
        assert met(ranks, Groups(2)).transfers.send_end_ns.tolist() == [end_ns]


def test_a_transfer_that_no_rank_waited_for_costs_nothing():
    send = {"start": 100, "duration": 9000, "flags": Flag.ASYNC}
    receive = {"start": 0, "duration": 5000, "flags": Flag.ASYNC}
    assert transfer_seconds(send, receive) == [0]
    waited = {"start": 130, "duration": 20, "flags": Flag.WAIT}
    assert transfer_seconds(send, {**receive, "duration": 150}, waited) == [50]


def test_a_transfer_with_only_one_recorded_end_is_not_counted():
    ranks = {1: spans({"op": Op.RECV, "peer": 0, "start": 100, "duration": 50})}
    assert met(ranks, Groups(2)).transfers.source.size == 0
    only_waited = {"start": 130, "duration": 20, "flags": Flag.WAIT}
    assert transfer_seconds({"start": 0, "duration": 5, "flags": Flag.ASYNC}, only_waited) == []


def test_a_collective_has_its_last_rank_its_transfer_time_and_the_longest_wait():
    ranks = {
        0: spans({"op": Op.ALL_REDUCE, "group": 3, "duration": 80, "bytes": 4096, "sequence": 7}),
        1: spans({"op": Op.ALL_REDUCE, "group": 9, "duration": 30, "bytes": 4096, "sequence": 7}),
    }
    found = met(ranks, groups(3, 9)).collectives
    assert (found.op.tolist(), found.sequence.tolist()) == ([Op.ALL_REDUCE], [7])
    assert (found.participants[0], found.last_rank[0], found.bytes[0]) == (2, 1, 4096)
    assert found.transfer_seconds[0] == 30e-9
    assert found.spread_seconds[0] == 50e-9
