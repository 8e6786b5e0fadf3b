"""One step of the whole job as columns: the input of the detectors.

Each table is a set of arrays of equal length, one row per operation. Durations are seconds, times
are nanoseconds of the server's CLOCK_REALTIME (with the remaining error of each node's clock:
compare times of one node, or use durations, which need no common clock). Unknown numbers are NaN or
-1, as arrays have no None; they do not leave the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One row per rank that took part; the columns of `RankStep`, start and end, and host time.

    `host_seconds`: the time outside of marked forwards and backwards in which nothing was recorded,
    and of the optimizer; 0 where that may be a wait (timed on a device, or no wait was recorded).
    Without such marks, `self_seconds` contains both: compute and, unless it is timed on a device,
    the optimizer.
    `routed_bytes`: received in all-to-alls of which ranks received different sizes, such as tokens
    for experts; 0 without them.
    """

    rank: Ints
    start_ns: Ints
    end_ns: Ints
    step_seconds: Floats
    self_seconds: Floats
    compute_seconds: Floats
    communication_seconds: Floats
    wait_seconds: Floats
    bubble_seconds: Floats
    data_wait_seconds: Floats
    optimizer_seconds: Floats
    checkpoint_seconds: Floats
    evaluation_seconds: Floats  # without waits for other ranks
    evaluation_wait_seconds: Floats  # these waits, inside evaluations
    gc_seconds: Floats
    host_seconds: Floats
    overlapped_seconds: Floats
    routed_bytes: Ints


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """One row per recorded FORWARD, BACKWARD and BACKWARD_WEIGHT of a rank."""

    rank: Ints
    op: Ints  # Op of the wire format
    microbatch: Ints  # -1: unknown
    chunk: Ints  # -1: unknown
    start_ns: Ints
    end_ns: Ints
    self_seconds: Floats  # without the waits nested in it
    tokens: Ints  # sum of the sequence lengths of the microbatch; 0: not given
    squared_tokens: Ints  # sum of their squares; 0: not given

    def where(self, rows: npt.NDArray[np.bool_]) -> ComputeTimes:
        """Return these rows."""
        return ComputeTimes(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """One row per point-to-point transfer for which both ends were recorded."""

    source: Ints
    destination: Ints
    op: Ints  # sender's: FORWARD_SEND, BACKWARD_SEND or SEND
    microbatch: Ints
    chunk: Ints  # sender's
    bytes: Ints
    send_start_ns: Ints
    send_end_ns: Ints  # when it no longer blocked its sender: for an async send, its start
    receive_start_ns: Ints
    end_ns: Ints  # receiver's
    # Time after both ends had entered the transfer: the shorter of the two durations. For an async
    # send, until the receive ended, using both clocks; 0 if no rank waited for an async receive.
    transfer_seconds: Floats


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """One row per collective for which at least two participants were recorded."""

    group: Ints  # a key of `StepTiming.groups`
    op: Ints
    sequence: Ints
    bytes: Ints
    participants: Ints  # participants that were recorded
    last_rank: Ints  # last rank to arrive: the one with the shortest time in the collective
    transfer_seconds: Floats  # after the last rank arrived
    spread_seconds: Floats  # longest wait in the collective


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One finished step."""

    step: int
    ranks: RankTimes
    compute: ComputeTimes
    transfers: TransferTimes
    collectives: CollectiveTimes
    groups: Mapping[int, tuple[int, ...]]  # by key: its ranks, ascending

    @property
    def rows(self) -> int:
        """Number of rows of all tables, as a measure of size."""
        return (
            self.ranks.rank.size
            + self.compute.rank.size
            + self.transfers.source.size
            + self.collectives.group.size
        )
