"""News of processes that had the ranks of a watched job before those that have them now.

A run of the same name and generation follows another, and its first batch may tell the end of the
other's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from paceline_server.store.models import Job, Rank
from paceline_wire.batch import Batch, Event, RankExited


class Strangers:
    def __init__(self, job: Job, ranks: Iterable[Rank], said: Mapping[int, int]) -> None:
        """`said`: as in `Placement`."""
        self._job_id, self._generation, self._said = job.id, job.generation, said
        self._pids = {row.rank: row.pid for row in ranks} if job.watched else {}

    def left_out(self, batch: Batch) -> Batch:
        """The batch without them."""
        if not self._pids or not any(map(self._is_one, batch.events)):
            return batch
        events = [event for event in batch.events if not self._is_one(event)]
        return msgspec.structs.replace(batch, events=events)

    def _is_one(self, event: Event) -> bool:
        return (
            isinstance(event, RankExited)
            and event.job == self._job_id
            and event.generation == self._said.get(event.rank, self._generation)
            and self._pids.get(event.rank, event.pid) != event.pid
        )
