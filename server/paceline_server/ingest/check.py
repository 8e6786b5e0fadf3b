"""Rejects values that the wire format allows but the database columns cannot hold."""

from __future__ import annotations

from operator import attrgetter

from paceline_wire.batch import (
    AgentHello,
    Batch,
    BatchError,
    CommandResult,
    Event,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankDump,
    RankExited,
    RankProfile,
    RankStackTraces,
    RankStarted,
    RankState,
    SpanBlock,
)
from paceline_wire.dumps import MAXIMUM_PACKED_BYTES

_LIMIT = 1 << 63  # signed 64-bit column
_LIMIT_32 = 1 << 31  # ranks, generations, pids, ports
_EVENTS = 100_000


def check(batch: Batch) -> None:
    """Check a batch. Raises BatchError("invalid", ...)."""
    if "\0" in batch.agent_id or "\0" in batch.boot_id:
        raise BatchError("invalid", "agent_id and boot_id must not contain NUL")
    if len(batch.events) > _EVENTS:
        raise BatchError("invalid", f"expected at most {_EVENTS} events, got {len(batch.events)}")
    _check_ranges(_batch_numbers(batch))
    for event in batch.events:
        _check_ranges(_event_numbers(event))
    for block in batch.spans:
        _check_ranges(_block_numbers(block))
    if batch.samples:  # the most numerous by far
        times = list(map(attrgetter("time_ns"), batch.samples))
        _check_ranges((("time_ns", min(times), _LIMIT), ("time_ns", max(times), _LIMIT)))


_Numbers = tuple[tuple[str, int, int], ...]  # (name, value, limit)


def _check_ranges(numbers: _Numbers) -> None:
    for name, value, limit in numbers:
        if not 0 <= value < limit:
            raise BatchError("invalid", f"{name}: expected 0 to {limit - 1}, got {value}")


def _batch_numbers(batch: Batch) -> _Numbers:
    return (
        ("sequence", batch.sequence, _LIMIT),
        ("packed_ns", batch.packed_ns, _LIMIT),
        ("dropped_batches", batch.dropped_batches, _LIMIT),
    )


def _block_numbers(block: SpanBlock) -> _Numbers:
    return (
        ("generation", block.generation, _LIMIT_32),
        ("rank", block.rank, _LIMIT_32),
        ("clock_offset_ns", block.clock_offset_ns, _LIMIT),
        ("lost", block.lost, _LIMIT),
    )


def _event_numbers(event: Event) -> _Numbers:
    at = ("time_ns", event.time_ns, _LIMIT)
    match event:
        case RankState() | RankDefined():
            return (at, *_rank(event.generation, event.rank))
        case AgentHello():
            gpus = (("gpu index", gpu.index, 1 << 16) for gpu in event.gpus)
            port = ("rendezvous_port", event.rendezvous_port, 1 << 16)
            return (at, ("slots", event.slots, 1 << 16), port, *gpus)
        case RankStarted():
            return (at, *_rank(event.generation, event.rank), ("pid", event.pid, _LIMIT_32))
        case RankExited():
            since = ("since_error_ns", event.since_error_ns, _LIMIT)
            return (at, since, *_rank(event.generation, event.rank), ("pid", event.pid, _LIMIT_32))
        case RankAttached(identity=identity):
            rank = _rank(identity.generation, identity.rank)
            return (at, *rank, ("pid", identity.pid, _LIMIT_32))
        case RankStackTraces():
            return (at, *_rank(event.generation, event.rank), ("pid", event.pid or 0, _LIMIT_32))
        case RankProfile():
            samples = (("samples", one.samples, _LIMIT) for one in (event.main, event.workers))
            begun = "begun_ns", event.begun_ns, _LIMIT
            return (at, begun, *samples, *_rank(event.generation, event.rank))
        case RankDump():
            return (
                at,
                *_rank(event.generation, event.rank),
                ("written_ns", event.written_ns or 0, _LIMIT),
                ("packed dump", len(event.content), MAXIMUM_PACKED_BYTES + 1),
            )
        case RankAcknowledged():
            command = ("command_id", event.command_id, _LIMIT), ("step", event.step, _LIMIT)
            return (at, *_rank(event.generation, event.rank), *command)
        case CommandResult():
            return (at, ("command_id", event.command_id, _LIMIT))
        case _:
            return (at,)


def _rank(generation: int, rank: int) -> _Numbers:
    return ("generation", generation, _LIMIT_32), ("rank", rank, _LIMIT_32)
