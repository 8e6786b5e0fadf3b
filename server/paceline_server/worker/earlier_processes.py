"""Events of the processes that ran the ranks of an external job before the current ones.

A run of the same name and generation may follow another, and its first batches may report the end
of the earlier run's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from paceline_server.store.models import JobRow, RankRow
from paceline_wire.batch import Batch, Event, RankExited


class EarlierProcesses:
    """Filters the exits of earlier processes out of batches."""

    def __init__(
        self, job: JobRow, ranks: Iterable[RankRow], reported_generations: Mapping[int, int]
    ) -> None:
        """`reported_generations`: `Placement.reported_generations`."""
        self._job_id, self._generation = job.id, job.generation
        self._reported_generations = reported_generations
        self._pids = {row.rank: row.pid for row in ranks} if job.watched else {}

    def filter(self, batch: Batch) -> Batch:
        """Return the batch without exits of earlier processes."""
        if not self._pids or not any(map(self._is_earlier, batch.events)):
            return batch
        events = [event for event in batch.events if not self._is_earlier(event)]
        return msgspec.structs.replace(batch, events=events)

    def _is_earlier(self, event: Event) -> bool:
        return (
            isinstance(event, RankExited)
            and event.job == self._job_id
            and event.generation == self._reported_generations.get(event.rank, self._generation)
            and self._pids.get(event.rank, event.pid) != event.pid
        )
