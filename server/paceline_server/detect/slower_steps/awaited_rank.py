"""A rank without steps of its own that the others wait for, as a generator or a parameter server.

It is compared with no peer, and what it does is part of no step. But it takes part in collectives
and transfers, and all leave a collective together: where its time in one is the shortest, it came
last, and each other rank waited for as long as its own time is longer. A receive waits for the rank
that sends, except for as long as that took to send. So no clocks are compared.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline_server.detect.observation import Observation
from paceline_server.steps.columns import Bools, Ints
from paceline_wire.spans import COLLECTIVE_OPS, RECEIVE_OPS, TRANSFER_OPS, Flag, Op, Span

RANKS_READ = 8  # ranks with steps whose records are read
MAXIMUM_OTHERS = 8  # ranks without steps
LEAST_STEPS = 4
MEASURED_EVERY_NS = 60_000_000_000
_MEASUREMENTS = 64

_Key = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AwaitedRank:
    """A rank without steps, and for how long the others wait for it per step, now and before."""

    rank: int
    seconds: float
    seconds_before: float


class AwaitedRanks:
    """The waits for the ranks without steps, measured once a minute, so that growth shows."""

    def __init__(self, world_size: int) -> None:
        self._has_steps: Bools = np.zeros(world_size, dtype=np.bool_)
        self._measured_ns: int | None = None
        # The newest step of each measurement, and seconds per step by rank; the oldest first.
        self._measured: deque[tuple[int, dict[int, float]]] = deque(maxlen=_MEASUREMENTS)

    def add(self, ranks: Ints) -> None:
        """Add the ranks that finished a step."""
        self._has_steps[ranks] = True

    def measure(self, newest: int, observation: Observation) -> None:
        """Measure, if it is due, after the step `newest`."""
        if self._has_steps.all():
            return
        last_ns = self._measured_ns
        if last_ns is not None and 0 <= observation.now_ns - last_ns < MEASURED_EVERY_NS:
            return
        self._measured_ns = observation.now_ns
        if waits := self._waits(0, observation):
            self._measured.append((newest, waits))

    def find(self, onset: int, increase: float, observation: Observation) -> AwaitedRank | None:
        """Return the rank for which each step waits so many seconds longer since step `onset`.

        None: no such rank, or the time before was not measured.
        """
        before = next((waits for step, waits in reversed(self._measured) if step < onset), None)
        if before is None or self._has_steps.all():
            return None
        grown = [
            AwaitedRank(rank, seconds, before.get(rank, 0.0))
            for rank, seconds in self._waits(onset, observation).items()
        ]
        most = max(grown, key=lambda one: one.seconds - one.seconds_before, default=None)
        if most is None or most.seconds - most.seconds_before < increase:
            return None
        return most

    def _waits(self, first: int, observation: Observation) -> dict[int, float]:
        """Return the seconds per step for each rank without steps, in the newest recorded steps,
        from `first` on; empty: too few are recorded."""
        records = observation.records
        if records is None:
            return {}
        others = np.flatnonzero(~self._has_steps)[:MAXIMUM_OTHERS].tolist()
        ranks = np.flatnonzero(self._has_steps)[:RANKS_READ].tolist()
        sent = {rank: _keyed(rank, records.of(rank), observation) for rank in others}
        steps, total = 0, dict.fromkeys(others, 0.0)
        for rank in ranks:
            spans = [span for span in records.of(rank) if span.step >= first]
            steps += sum(span.op == Op.STEP for span in spans)
            for key, seconds in _keyed(rank, spans, observation).items():
                found = [(sent[other][key], other) for other in others if key in sent[other]]
                if found:
                    own, last = min(found)
                    total[last] += max(seconds - own, 0.0)
        if steps < LEAST_STEPS:
            return {}
        return {rank: seconds / steps for rank, seconds in total.items()}


def _keyed(rank: int, spans: Iterable[Span], observation: Observation) -> dict[_Key, float]:
    """Return for how long the rank was in each collective and transfer with other ranks.

    The same operation has the same key on all its ranks.
    """
    found: dict[_Key, float] = defaultdict(float)
    for span in spans:
        if span.flags & Flag.ASYNC or not span.sequence:
            continue
        key: _Key
        if span.op in COLLECTIVE_OPS:
            key = (observation.groups.key(rank, span.group), span.sequence)
        elif span.op in RECEIVE_OPS:
            key = (span.peer, rank, span.sequence)
        elif span.op in TRANSFER_OPS:
            key = (rank, span.peer, span.sequence)
        else:
            continue
        if None not in key:
            found[key] += span.duration_ns / 1e9
    return found
