"""The rings of two real gloo ranks (in `two_ranks.py`, each step is a scenario)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from paceline_wire.ring import GroupDefinition, RingReader
from paceline_wire.spans import COMMUNICATION_OPS, Flag, Op, Span
from paceline_wire.topology import Coordinates, Topology
from tests.trainer_hooks.conftest import Script

TENSOR_BYTES = 4000
_SOURCE = (Path(__file__).parents[1] / "two_ranks.py").read_text()
SCENARIOS = next(
    [name.id for name in node.value.elts if isinstance(name, ast.Name)]
    for node in ast.parse(_SOURCE).body
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List)
)


def during(spans: list[Span], scenario: str) -> list[Span]:
    step = SCENARIOS.index(scenario)
    return [span for span in spans if span.step == step and span.op in COMMUNICATION_OPS]


def test_every_blocking_collective_is_one_span(two_rank_spans: list[list[Span]]) -> None:
    for rank, spans in enumerate(two_rank_spans):
        found = [(span.op, span.bytes) for span in during(spans, "blocking_collectives")]
        assert found == [
            (Op.ALL_REDUCE, TENSOR_BYTES),
            (Op.ALL_REDUCE, TENSOR_BYTES),
            (Op.ALL_REDUCE, TENSOR_BYTES),
            (Op.BROADCAST, TENSOR_BYTES),
            (Op.ALL_GATHER, 2 * TENSOR_BYTES),
            (Op.ALL_GATHER, 2 * TENSOR_BYTES),
            (Op.REDUCE_SCATTER, 2 * TENSOR_BYTES),
            (Op.ALL_TO_ALL, (TENSOR_BYTES // 2, 3 * TENSOR_BYTES // 2)[rank]),  # as received
            (Op.REDUCE, TENSOR_BYTES),
            (Op.GATHER, TENSOR_BYTES),
            (Op.SCATTER, TENSOR_BYTES),
            (Op.BARRIER, 0),
        ]
        assert {span.flags for span in during(spans, "blocking_collectives")} == {0}


def test_each_group_counts_its_own_collectives(two_rank_spans: list[list[Span]]) -> None:
    for spans in two_rank_spans:
        found = during(spans, "blocking_collectives")
        default = [span.sequence for span in found if span.group == 0]
        named = [span.sequence for span in found if span.group != 0]
        assert default == list(range(default[0], default[0] + len(default)))
        assert named == [1, 2]


def test_both_ranks_give_a_collective_the_same_number(two_rank_spans: list[list[Span]]) -> None:
    numbers = [
        sorted(
            {
                (span.group, span.sequence, span.op)
                for span in spans
                if span.op in COMMUNICATION_OPS and span.peer is None
            }
        )
        for spans in two_rank_spans
    ]
    assert numbers[0] == numbers[1]


def test_asynchronous_work_is_recorded_from_launch_to_completion(
    two_rank_spans: list[list[Span]],
) -> None:
    for spans in two_rank_spans:
        found = during(spans, "asynchronous_collectives")
        launched = {span.op: span for span in found if span.flags & Flag.ASYNC}
        # In torch 2.6 a call does not say whether the caller waits at once: the barrier, which is
        # waited for right after its launch, counts as blocking.
        assert {Op.ALL_REDUCE} <= set(launched)
        assert {span.op for span in found} == {Op.ALL_REDUCE, Op.BARRIER}
        for wait in found:
            if wait.flags & Flag.WAIT:
                span = launched[Op(wait.op)]
                assert wait.sequence == span.sequence
                assert span.start_ns <= wait.start_ns
                assert span.end_ns <= wait.end_ns


def test_an_object_collective_is_recorded_as_its_parts(two_rank_spans: list[list[Span]]) -> None:
    """`all_gather_object` gathers the sizes and then the objects: two records, not three."""
    for spans in two_rank_spans:
        found = during(spans, "object_collectives")
        assert [span.op for span in found] == [Op.ALL_GATHER, Op.ALL_GATHER]


@pytest.mark.parametrize(("rank", "op"), [(0, Op.SEND), (1, Op.RECV)])
def test_transfers_count_per_peer_and_direction(
    two_rank_spans: list[list[Span]], rank: int, op: Op
) -> None:
    found = [
        span for span in during(two_rank_spans[rank], "plain_transfers") if span.flags != Flag.WAIT
    ]
    assert [(span.op, span.peer, span.sequence, span.bytes) for span in found] == [
        (op, 1 - rank, 1, TENSOR_BYTES),
        (op, 1 - rank, 2, TENSOR_BYTES),
        (op, 1 - rank, 3, TENSOR_BYTES),
    ]


@pytest.mark.parametrize(
    ("scenario", "microbatch", "chunk", "sequence"),
    [("pipelined_blocking", 1, 2, 4), ("pipelined_waited_inside", 2, 0, 5)],
)
def test_a_transfer_inside_an_action_is_recorded_as_that_action(
    two_rank_spans: list[list[Span]], scenario: str, microbatch: int, chunk: int, sequence: int
) -> None:
    for rank, op in ((0, Op.FORWARD_SEND), (1, Op.FORWARD_RECV)):
        (span,) = during(two_rank_spans[rank], scenario)
        assert (span.op, span.microbatch, span.chunk) == (op, microbatch, chunk)
        assert (span.peer, span.sequence, span.bytes) == (1 - rank, sequence, TENSOR_BYTES)
        assert span.flags == 0


def test_a_transfer_that_outlives_its_action_is_recorded_when_it_ends(
    two_rank_spans: list[list[Span]],
) -> None:
    for rank, op in ((0, Op.FORWARD_SEND), (1, Op.FORWARD_RECV)):
        found = [
            span
            for span in during(two_rank_spans[rank], "pipelined_waited_outside")
            if span.op == op
        ]
        assert found[0].flags == Flag.ASYNC
        assert all(span.flags == Flag.WAIT for span in found[1:])
        assert {(span.microbatch, span.sequence) for span in found} == {(3, 6)}


def test_a_collective_has_the_microbatch_of_the_enclosing_action(
    two_rank_spans: list[list[Span]],
) -> None:
    for spans in two_rank_spans:
        (span,) = [
            span for span in during(spans, "pipelined_waited_outside") if span.op == Op.ALL_REDUCE
        ]
        assert (span.microbatch, span.chunk) == (4, 0)


def test_the_other_direction_of_a_batch_is_recorded_separately(
    two_rank_spans: list[list[Span]],
) -> None:
    for spans in two_rank_spans:
        found = during(spans, "both_ways_in_one_batch")
        assert [span.op for span in found].count(Op.FORWARD_SEND) == 1
        received = [span for span in found if span.op == Op.RECV]
        assert received[0].flags == Flag.ASYNC
        assert {span.microbatch for span in found} == {5}


def test_operations_created_before_init_still_work(two_rank_spans: list[list[Span]]) -> None:
    for spans, op in zip(two_rank_spans, (Op.SEND, Op.RECV), strict=True):
        assert {span.op for span in during(spans, "operation_made_before_init")} == {op}


def test_other_threads_are_recorded_too(
    two_ranks: list[RingReader], two_rank_spans: list[list[Span]]
) -> None:
    for spans in two_rank_spans:
        step = SCENARIOS.index("another_thread")
        (span,) = during(spans, "another_thread")
        assert (span.op, span.flags) == (Op.ALL_REDUCE, Flag.ASYNC), "it held up nobody"
        assert any(span.op >= 1024 and span.step == step for span in spans)


def test_a_failing_collective_is_entered_and_never_left(two_rank_spans: list[list[Span]]) -> None:
    for spans in two_rank_spans:
        assert during(spans, "failing_collective") == []


def test_the_state_page_ends_with_everything_but_the_failed_one_left(
    two_ranks: list[RingReader],
) -> None:
    for rank, reader in enumerate(two_ranks):
        view = reader.view()
        assert view.status == "finished"
        assert view.frames == []
        (peer,) = view.peers
        sent, received = (8, 1) if rank == 0 else (1, 8)
        assert (peer.send_entered, peer.send_left) == (sent, sent)
        assert (peer.recv_entered, peer.recv_left) == (received, received)
        default, named = view.groups
        assert named.entered == named.left == 3
        assert default.entered == default.left + 1
        # The op and payload, for comparison with the other ranks.
        assert (default.op, default.bytes) == (Op.BROADCAST, TENSOR_BYTES)


def test_groups_are_named_with_their_global_ranks(two_ranks: list[RingReader]) -> None:
    for reader in two_ranks:
        groups = {
            definition.id: definition
            for definition in reader.new_definitions()
            if isinstance(definition, GroupDefinition)
        }
        # The mesh's only real dimension spans the world: torch gives it the default group, or, in
        # older releases, a group of its own that is not used here.
        assert (groups[0].name, groups[0].axis) in (("tp", "tp"), ("world", "world"))
        (pair,) = [group for group in groups.values() if group.name == "pair"]
        assert pair.axis == "dp"
        assert pair.ranks == groups[0].ranks == [0, 1]


def test_coordinates_come_from_the_mesh(two_ranks: list[RingReader]) -> None:
    for rank, reader in enumerate(two_ranks):
        assert reader.identity.topology == Topology(1, 1, 2)
        assert reader.identity.coordinates == Coordinates(0, 0, rank)
        assert reader.identity.metadata["made_by"] == "a test"


def test_every_step_contains_its_spans(two_rank_spans: list[list[Span]]) -> None:
    for spans in two_rank_spans:
        steps = [span.step for span in spans if span.op == Op.STEP]
        assert steps == list(range(len(SCENARIOS)))


RESULT = """
import os, weakref
os.environ["PACELINE_PURE_PYTHON"] = "{pure}"
import torch, torch.distributed as dist
import paceline

paceline.init()
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
next(iter(paceline.steps([0])))
future = dist.all_reduce(torch.ones(1000), async_op=True).get_future()
chained = future.then(lambda done: done.value()[0])
kept = weakref.ref(future)
del future
print(chained.wait()[0].item(), kept())
"""


@pytest.mark.parametrize("pure", ["", "1"], ids=["built", "pure"])
def test_a_result_that_nobody_waits_for_in_python_is_freed(
    script: Script, library_of_process_groups: None, pure: str
) -> None:
    finished = script(RESULT.format(pure=pure))
    assert finished.stdout == "1.0 None\n", finished.stderr
