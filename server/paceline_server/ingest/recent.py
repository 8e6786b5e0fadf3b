"""The newest batches as they were decoded when they came, for workers of the same process.

Only to spare the work: a worker that finds a batch here no more decodes it from the log.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from paceline_wire.batch import Batch

Key = tuple[str, str, int]  # agent, boot, sequence
# A worker that keeps up reads within a second what hundreds of nodes have sent.
_BYTES = 48 << 20
_EVENT_BYTES, _SAMPLE_BYTES = 1500, 400  # about what one takes as objects


class RecentBatches:
    """Never change what is in here: several jobs' workers may look at one batch."""

    def __init__(self, limit_bytes: int = _BYTES) -> None:
        """`limit_bytes`: 0 where no worker is in the process."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._batches: OrderedDict[Key, tuple[Batch, int]] = OrderedDict()
        self._bytes = 0

    def put(self, batch: Batch) -> None:
        if not self._limit_bytes:
            return
        size = _size(batch)
        with self._lock:
            if (batch.agent_id, batch.boot_id, batch.sequence) in self._batches:
                return
            self._batches[batch.agent_id, batch.boot_id, batch.sequence] = batch, size
            self._bytes += size
            while self._bytes > self._limit_bytes:
                _, (_, oldest) = self._batches.popitem(last=False)
                self._bytes -= oldest

    def get(self, key: Key) -> Batch | None:
        with self._lock:
            found = self._batches.get(key)
        return None if found is None else found[0]

    def __len__(self) -> int:
        return len(self._batches)


def _size(batch: Batch) -> int:
    columns = sum(len(block.columns) for block in batch.spans)
    return columns + _EVENT_BYTES * len(batch.events) + _SAMPLE_BYTES * len(batch.samples)
