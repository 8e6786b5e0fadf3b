"""Refuses what the wire allows but the store cannot hold: numbers and text beyond its columns."""

from __future__ import annotations

from collections.abc import Iterator

from paceline_wire.batch import (
    AgentHello,
    Batch,
    BatchError,
    CommandResult,
    Event,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankExited,
    RankStacks,
    RankStarted,
    RankState,
)

_LIMIT = 1 << 63  # of a signed 64-bit column
_LIMIT_32 = 1 << 31  # ranks, generations, pids, ports
_EVENTS = 100_000


def check(batch: Batch) -> None:
    """Raises BatchError("invalid", ...)."""
    if "\0" in batch.agent_id or "\0" in batch.boot_id:
        raise BatchError("invalid", "agent_id and boot_id hold no NUL")
    if len(batch.events) > _EVENTS:
        raise BatchError("invalid", f"{len(batch.events)} events, at most {_EVENTS}")
    for name, value, limit in _numbers(batch):
        if not 0 <= value < limit:
            raise BatchError("invalid", f"{name} of {value} is not in 0..{limit - 1}")


def _numbers(batch: Batch) -> Iterator[tuple[str, int, int]]:
    yield "sequence", batch.sequence, _LIMIT
    yield "packed_ns", batch.packed_ns, _LIMIT
    yield "dropped_batches", batch.dropped_batches, _LIMIT
    for event in batch.events:
        yield "time_ns", event.time_ns, _LIMIT
        yield from _event_numbers(event)
    for block in batch.spans:
        yield "generation", block.generation, _LIMIT_32
        yield "rank", block.rank, _LIMIT_32
        yield "clock_offset_ns", block.clock_offset_ns, _LIMIT
        yield "lost", block.lost, _LIMIT
    for sample in batch.samples:
        yield "time_ns", sample.time_ns, _LIMIT


def _event_numbers(event: Event) -> Iterator[tuple[str, int, int]]:
    match event:
        case AgentHello():
            yield "slots", event.slots, 1 << 16
            yield "rendezvous_port", event.rendezvous_port, 1 << 16
            for gpu in event.gpus:
                yield "gpu index", gpu.index, 1 << 16
        case RankStarted() | RankExited():
            yield from _rank(event.generation, event.rank)
            yield "pid", event.pid, _LIMIT_32
        case RankAttached():
            yield from _rank(event.identity.generation, event.identity.rank)
            yield "pid", event.identity.pid, _LIMIT_32
        case RankDefined() | RankState():
            yield from _rank(event.generation, event.rank)
        case RankStacks():
            yield from _rank(event.generation, event.rank)
            yield "pid", event.pid or 0, _LIMIT_32
        case RankAcknowledged():
            yield from _rank(event.generation, event.rank)
            yield "command_id", event.command_id, _LIMIT
            yield "step", event.step, _LIMIT
        case CommandResult():
            yield "command_id", event.command_id, _LIMIT


def _rank(generation: int, rank: int) -> Iterator[tuple[str, int, int]]:
    yield "generation", generation, _LIMIT_32
    yield "rank", rank, _LIMIT_32
