"""CUDA events: device spans on the host's clock, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import pytest
import torch

import paceline
from paceline_wire.ring import RingReader
from paceline_wire.spans import Flag, Op, Span, unpack

CYCLES = 20_000_000  # GPU clock cycles: 10 ms at 2 GHz
LONGEST_CLOCK_HZ = 5e9  # no GPU is faster, so CYCLES take at least 4 ms
TOLERANCE_NS = 2_000_000


def run(body: Callable[[], None], steps: int = 1) -> None:
    """Run steps and wait until the device is idle after each, so that all spans resolve."""
    for _ in paceline.steps(range(steps)):
        body()
        torch.cuda.synchronize()
    for _ in paceline.steps([0]):
        pass


def on_device(reader: RingReader) -> list[Span]:
    return [span for span in unpack(reader.read()) if span.flags & Flag.DEVICE]


def kernel() -> None:
    torch.cuda._sleep(CYCLES)


def test_a_section_lasts_as_long_as_its_kernel(reader: RingReader) -> None:
    def body() -> None:
        with paceline.section("kernel"):
            kernel()

    run(body, steps=3)
    found = on_device(reader)
    assert [span.op for span in found] == [1024] * 3
    assert all(span.duration_ns >= CYCLES / LONGEST_CLOCK_HZ * 1e9 for span in found)


def test_device_spans_lie_within_the_hosts_bounds(reader: RingReader) -> None:
    seen = []

    def body() -> None:
        before = perf_counter_ns()
        with paceline.pipelining(Op.FORWARD, microbatch=2, chunk=1):
            kernel()
        torch.cuda.synchronize()
        seen.append((before, perf_counter_ns()))

    run(body, steps=5)
    found = on_device(reader)
    assert len(found) == 5
    for span, (before, after) in zip(found, seen, strict=True):
        assert (span.op, span.microbatch, span.chunk) == (Op.FORWARD, 2, 1)
        assert before - TOLERANCE_NS <= span.start_ns
        assert span.end_ns <= after + TOLERANCE_NS


def test_kernels_queued_together_get_separate_spans(reader: RingReader) -> None:
    def body() -> None:
        for microbatch in range(3):
            with paceline.pipelining(Op.FORWARD, microbatch=microbatch):
                kernel()

    run(body)
    first, second, third = on_device(reader)
    assert first.end_ns <= second.start_ns + TOLERANCE_NS
    assert second.end_ns <= third.start_ns + TOLERANCE_NS


@pytest.mark.usefixtures("no_synchronize")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device(reader: RingReader) -> None:
    loss = torch.ones((), device="cuda")
    for _ in paceline.steps(range(10)):
        with paceline.section("outer"), paceline.pipelining(Op.BACKWARD, microbatch=0):
            kernel()
        with paceline.optimizer():
            loss = loss * 2
        paceline.report(loss=loss, gradient_norm=loss)
        paceline.pending()


def test_a_loss_on_the_device_arrives_with_its_step(reader: RingReader) -> None:
    for step in paceline.steps(range(3)):
        paceline.report(loss=torch.full((), float(step), device="cuda"))
        torch.cuda.synchronize()
    for _ in paceline.steps([0]):
        pass
    view = reader.view()
    assert (view.loss_step, view.loss) == (2, 2.0)


def test_a_captured_graph_replays(reader: RingReader) -> None:
    """Events must not become part of the graph."""
    source, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()

    def body() -> None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph), paceline.section("captured"):
            doubled = source * 2
        graph.replay()
        torch.cuda.synchronize()
        assert doubled.tolist() == [2.0] * 8

    run(lambda: None)
    run(body)
    captured = [span for span in unpack(reader.read()) if span.op == 1024]
    assert [span.flags for span in captured] == [0]


def test_the_pool_stops_growing(reader: RingReader) -> None:
    from paceline import hooks  # noqa: PLC0415 (a test of internals)

    def body() -> None:
        for _ in range(50):
            with paceline.section("short"):
                pass

    run(body, steps=5)
    session = hooks._session
    assert session is not None
    assert session.timer is not None
    free = len(session.timer._free)
    run(body, steps=50)
    assert len(session.timer._free) <= free + 4
