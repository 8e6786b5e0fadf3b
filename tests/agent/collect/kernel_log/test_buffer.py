"""A replacement for the kernel's buffer, and that of this machine."""

from __future__ import annotations

import pytest

from paceline_agent.collect.kernel_log.buffer import KernelLogBuffer, kernel_buffer_bytes


class Kernel:
    """A buffer of limited size, which returns its newest whole lines that fit."""

    def __init__(self, capacity_bytes: int = 1 << 17) -> None:
        self._lines: list[bytes] = []
        self._capacity_bytes = capacity_bytes

    def log(self, *messages: str) -> None:
        for message in messages:
            at = f"{len(self._lines):12d}.000000"
            self._lines.append(f"<3>[{at}] {message}\n".encode())

    def read(self, size_bytes: int) -> bytes:
        kept: list[bytes] = []
        for line in reversed(self._lines):
            if sum(map(len, kept)) + len(line) > min(size_bytes, 2 * self._capacity_bytes):
                break
            kept.append(line)
        return b"".join(reversed(kept))

    def capacity_bytes(self) -> int:
        return self._capacity_bytes


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def buffer(kernel: Kernel) -> KernelLogBuffer:
    return KernelLogBuffer(kernel.read, kernel.capacity_bytes)


def messages(buffer: KernelLogBuffer, lines_at_most: int = 10_000) -> list[str]:
    return [line.text.partition("] ")[2] for line in buffer.read_lines(lines_at_most)]


def test_every_line_is_returned_once(kernel, buffer):
    kernel.log("first", "second")
    assert messages(buffer) == ["first", "second"]
    assert messages(buffer) == []
    kernel.log("second", "third")
    assert messages(buffer) == ["second", "third"]
    assert buffer.drained


def test_a_long_log_is_returned_in_parts(kernel, buffer):
    kernel.log(*map(str, range(25)))
    assert messages(buffer, 10) == [*map(str, range(10))]
    assert not buffer.caught_up
    assert messages(buffer, 10) == [*map(str, range(10, 20))]
    kernel.log("newer")
    assert messages(buffer, 10) == [*map(str, range(20, 25))]
    assert buffer.caught_up
    assert messages(buffer) == ["newer"]


def test_more_lines_than_usual_between_two_calls_are_all_returned(kernel, buffer):
    kernel.log("first")
    messages(buffer)
    kernel.log(*(f"{number} {'x' * 80}" for number in range(1000)))
    assert len(messages(buffer)) == 1000


def test_lines_that_were_overwritten_are_missing(buffer, kernel):
    kernel.log("first")
    messages(buffer)
    kernel.log(*(f"{number} {'x' * 80}" for number in range(5000)))
    assert messages(buffer)[-1].startswith("4999 ")
    kernel.log("newest")
    assert messages(buffer) == ["newest"]


def test_a_log_that_was_cleared_continues(buffer, kernel):
    kernel.log("first")
    messages(buffer)
    kernel._lines.clear()
    assert messages(buffer) == []
    kernel.log("first")
    assert messages(buffer) == ["first"]


def test_the_buffer_of_this_machine_is_read_where_it_may_be():
    buffer = KernelLogBuffer()
    try:
        lines = buffer.read_lines(1 << 20)
    except OSError as error:
        pytest.skip(f"it may not be read here: {error}")
    assert sum(len(line.text) + 1 for line in lines) <= 2 * kernel_buffer_bytes()
    assert all("\0" not in line.text for line in lines)
