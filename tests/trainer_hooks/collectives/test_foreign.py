"""Communication that the script does not start with a plain call (`foreign_ranks.py`)."""

from __future__ import annotations

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

from paceline_wire.spans import COMMUNICATION_OPS, TRANSFER_OPS, Flag, Op, Span

_SOURCE = (Path(__file__).parents[1] / "foreign_ranks.py").read_text()
SCENARIOS = next(
    [name.id for name in node.value.elts if isinstance(name, ast.Name)]
    for node in ast.parse(_SOURCE).body
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List)
)
FSDP2 = "fully_sharded"
RELEASE = tuple(map(int, version("torch").split(".")[:2]))
needs_fsdp2 = pytest.mark.skipif(RELEASE < (2, 7), reason="FSDP2 did not run on the CPU")
LAYER_BYTES = 64 * 64 * 4
LATE_NS = 300_000_000


def during(spans: list[Span], scenario: str) -> list[Span]:
    step = SCENARIOS.index(scenario)
    return [span for span in spans if span.step == step and span.op in COMMUNICATION_OPS]


def blocked_ns(spans: list[Span]) -> int:
    """Return how long the training thread was blocked in communication."""
    return sum(span.duration_ns for span in spans if not span.flags & Flag.ASYNC)


def calls(spans: list[Span]) -> list[tuple[int, int, int]]:
    """Return (op, group, sequence) of each call, once."""
    return [(span.op, span.group, span.sequence) for span in spans if not span.flags & Flag.WAIT]


WITH_A_LATE_RANK = sorted({*SCENARIOS} - {"first", "no_sync", "last", FSDP2})


@pytest.mark.parametrize("scenario", [*WITH_A_LATE_RANK, pytest.param(FSDP2, marks=needs_fsdp2)])
def test_the_rank_in_time_waits_for_the_late_one(
    foreign_spans: list[list[Span]], scenario: str
) -> None:
    in_time, late = (during(spans, scenario) for spans in foreign_spans)
    assert blocked_ns(in_time) > LATE_NS / 2
    assert blocked_ns(late) < blocked_ns(in_time)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_call_is_recorded_once_and_with_the_same_number_on_both_ranks(
    foreign_spans: list[list[Span]], scenario: str
) -> None:
    found = [calls(during(spans, scenario)) for spans in foreign_spans]
    assert all(len(set(each)) == len(each) for each in found)
    collectives = [[call for call in each if call[0] not in TRANSFER_OPS] for each in found]
    assert sorted(collectives[0]) == sorted(collectives[1])


@pytest.mark.parametrize("scenario", ["reducer", "reducer_with_views", "reducer_of_a_static_graph"])
def test_each_bucket_of_the_reducer_is_a_call_and_its_end_one_wait(
    foreign_spans: list[list[Span]], scenario: str
) -> None:
    for spans in foreign_spans:
        found = during(spans, scenario)
        buckets = [span for span in found if span.flags & Flag.ASYNC]
        assert [(span.op, span.bytes) for span in buckets] == [(Op.ALL_REDUCE, LAYER_BYTES)] * 3
        assert len(found) - len(buckets) <= 1
    [wait] = [span for span in during(foreign_spans[0], scenario) if span.flags & Flag.WAIT]
    assert wait.sequence == max(span.sequence for span in during(foreign_spans[0], scenario))


def test_a_communication_hook_sends_half(foreign_spans: list[list[Span]]) -> None:
    found = [s for s in during(foreign_spans[0], "reducer_with_a_hook") if s.flags & Flag.ASYNC]
    assert [(span.op, span.bytes) for span in found] == [(Op.ALL_REDUCE, LAYER_BYTES // 2)] * 3


def test_nothing_is_communicated_without_synchronization(
    foreign_spans: list[list[Span]],
) -> None:
    assert [during(spans, "no_sync") for spans in foreign_spans] == [[], []]


@needs_fsdp2
def test_sharded_layers_gather_and_scatter(foreign_spans: list[list[Span]]) -> None:
    for spans in foreign_spans:
        ops = [op for op, _, _ in calls(during(spans, FSDP2))]
        assert ops.count(Op.ALL_GATHER) >= 3
        assert ops.count(Op.REDUCE_SCATTER) == 3


def test_a_blocking_call_is_one_span(foreign_spans: list[list[Span]]) -> None:
    for spans in foreign_spans:
        for scenario in ("later_group", "inference", "monitored_barrier"):
            assert [span.flags for span in during(spans, scenario)] == [Flag.NONE], scenario
