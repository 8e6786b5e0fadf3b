"""The event pool, with a device that is a fake clock (tests/gpu has a real one)."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import pytest

from paceline.device import (
    MAXIMUM_QUEUED,
    DevicePipelining,
    DeviceSection,
    DeviceTimer,
    DeviceTransfer,
)
from paceline.recorder import Recorder
from paceline_wire.ring import RingReader
from paceline_wire.spans import Flag, Op, Span, unpack


class Device:
    """A device that lags behind the host: it completes queued events only in `catch_up`."""

    def __init__(self) -> None:
        self.passed_ms = 0.0
        self.next_ms = 0.0
        self.created = 0
        self.capturing = False
        device = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                device.created += 1

            def record(self, stream: str) -> None:
                assert stream == "stream of 1", "an event of another device creates a context"
                self.at_ms = device.next_ms

            def query(self) -> bool:
                return self.at_ms <= device.passed_ms

            def synchronize(self) -> None:
                device.passed_ms = max(device.passed_ms, self.at_ms)

            def elapsed_time(self, end: Any, /) -> float:
                assert self.query()
                assert end.query()
                return float(end.at_ms - self.at_ms)

        self.Event = Event

    def current_stream(self, device: int) -> str:
        return f"stream of {device}"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def kernel(self, milliseconds: float) -> None:
        self.next_ms += milliseconds

    def catch_up(self) -> None:
        self.passed_ms = self.next_ms


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timer(device: Device, ring: Recorder) -> DeviceTimer:
    return DeviceTimer(device, ring, 1)


def spans(ring: Recorder) -> list[Span]:
    return list(unpack(RingReader(ring.ring.path).read()))


def test_a_span_is_written_once_the_device_has_passed_it(
    device: Device, timer: DeviceTimer, ring: Recorder
) -> None:
    section = DeviceSection(ring, 1024, timer)
    with section:
        device.kernel(3.0)
    timer.resolve()
    assert spans(ring) == []
    device.catch_up()
    timer.resolve()
    (span,) = spans(ring)
    assert span.flags == Flag.DEVICE
    assert span.duration_ns == 3_000_000


def test_device_intervals_are_preserved_on_the_host_clock(device: Device, ring: Recorder) -> None:
    before = perf_counter_ns()
    timer = DeviceTimer(device, ring, 1)  # which reads both clocks
    for milliseconds in (1.0, 2.0, 4.0):
        with DevicePipelining(ring, Op.FORWARD, 0, 0, None, timer):
            device.kernel(milliseconds)
    device.catch_up()
    timer.resolve()
    after = perf_counter_ns()
    first, second, third = spans(ring)
    assert (second.start_ns, third.start_ns) == (first.end_ns, second.end_ns)
    assert before <= first.start_ns <= after


def test_events_are_reused(device: Device, timer: DeviceTimer, ring: Recorder) -> None:
    section = DeviceSection(ring, 1024, timer)
    for step in range(100):
        with section, section:
            device.kernel(0.5)
        device.catch_up()
        timer.resolve()
        if step == 3:
            created = device.created
    assert device.created == created
    assert len(spans(ring)) == 200


def test_a_device_that_never_answers_costs_bounded_memory(
    device: Device, timer: DeviceTimer, ring: Recorder
) -> None:
    device.kernel(1.0)
    section = DeviceSection(ring, 1024, timer)
    for _ in range(MAXIMUM_QUEUED + 10):
        with section:
            pass
    assert timer.dropped == 10
    assert device.created < 2 * MAXIMUM_QUEUED + 10


def test_inside_a_captured_graph_host_time_is_recorded(
    device: Device, timer: DeviceTimer, ring: Recorder
) -> None:
    device.capturing = True
    with DeviceSection(ring, 1024, timer), DeviceTransfer(ring, Op.FORWARD_SEND, 0, 0, 1, timer):
        pass
    inner, outer = spans(ring)
    assert (inner.flags, outer.flags) == (0, 0)
    assert ring.depth == 0


def test_anchors_stay_within_the_bounds_that_the_host_observed(
    device: Device, timer: DeviceTimer, ring: Recorder
) -> None:
    """A device clock that runs ten times too fast is corrected at each anchor."""
    section = DeviceSection(ring, 1024, timer)
    for _ in range(50):
        with section:
            device.kernel(1000.0)
        device.catch_up()
        timer.resolve()
    last = spans(ring)[-1]
    # One second beyond the previous anchor is possible, but fifty of them must not accumulate.
    assert last.end_ns < perf_counter_ns() + 3_000_000_000


def test_a_loss_on_the_device_is_shown_when_it_arrives(
    device: Device, timer: DeviceTimer, ring: Recorder
) -> None:
    ring.begin_step(4)
    device.kernel(1.0)
    timer.report((2.5, None, None))
    ring.begin_step(5)
    timer.resolve()
    reader = RingReader(ring.ring.path)
    assert reader.view().loss is None
    device.catch_up()
    timer.resolve()
    assert (reader.view().loss_step, reader.view().loss) == (4, 2.5)
