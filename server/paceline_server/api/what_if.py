"""What-if analysis of a job's last steps, made when it is asked for, and not too often.

Reading and replaying the steps of a large job takes about a second of one core. So an answer stands
until there is a newer step, and at least as long as keeps the cost below 5% of a core however many
ask, unless an incident opens or ends meanwhile; a large job is asked for fewer steps.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline_server.api import resources, schemas
from paceline_server.api.problems import not_found
from paceline_server.api.recorded import Recorded, recorded_steps
from paceline_server.detect.bubble.pipeline_advice import advise_step
from paceline_server.steps.timing import StepTiming
from paceline_server.store import models, queries
from paceline_server.store.database import Database
from paceline_server.whatif.online import RunReplay

# Steps times ranks that are replayed for one answer.
MOST_RANK_STEPS = 8192
# An answer stands for so many times the CPU time it took, and at least so long.
REST = 20.0
LEAST_SECONDS = 2.0
JOBS_KEPT = 64

NO_STEP = "No step of this generation is finished yet: the first one brings the answer."
NOTHING_KEPT = (
    "Of the last steps not enough is kept: some rank sent nothing, or what was sent is pruned. Ask "
    "while the job runs, or let the server keep more: PACELINE_SERVER_LOG_RETENTION_SECONDS."
)
NO_REPLAY = (
    "The last steps cannot be replayed: of some stage no forward or backward was recorded, or what "
    "was recorded does not add up to the step. The hooks must see each microbatch of every stage."
)


@dataclass(frozen=True)
class _Moment:
    generation: int
    step: int | None  # the newest
    incident_id: str | None  # the newest that is open


@dataclass(frozen=True)
class _CachedAnswer:
    moment: _Moment  # when it was made
    stands_until: float
    resource: schemas.WhatIf


class WhatIfs:
    """The answers given last, by job. One is made at a time; meanwhile the one before stands."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, from any beginning."""
        self._clock = clock
        self._making = threading.Lock()
        self._answers: OrderedDict[tuple[str, int], _CachedAnswer] = OrderedDict()

    def of(self, database: Database, job_id: str, steps: int) -> schemas.WhatIf:
        """Raises Problem if there is no such job."""
        key = (job_id, steps)
        with database.read() as session:
            job = session.get(models.JobRow, job_id) if "\0" not in job_id else None
            if job is None:
                raise not_found("job", job_id)
            newest = queries.steps(session, job_id, None, 1, job.generation)
            incident = queries.newest_open_incident(session, job_id)
            now = _Moment(
                generation=job.generation,
                step=newest[0].step if newest else None,
                incident_id=None if incident is None else incident.id,
            )
        known = self._answers.get(key)
        if known is not None and self._stands(known, now):
            return known.resource
        # Who finds one being made has no need of another, unless it is of another generation.
        alike = known is not None and known.moment.generation == now.generation
        if not self._making.acquire(blocking=not alike):
            assert known is not None
            return known.resource
        try:
            return self._make(database, key, now)
        finally:
            self._making.release()

    def _stands(self, answer: _CachedAnswer, now: _Moment) -> bool:
        made = answer.moment
        # What was replayed before an incident began would contradict it.
        if (made.generation, made.incident_id) != (now.generation, now.incident_id):
            return False
        return made.step == now.step or self._clock() < answer.stands_until

    def _make(self, database: Database, key: tuple[str, int], now: _Moment) -> schemas.WhatIf:
        known = self._answers.get(key)  # made while this one waited
        if known is not None and self._stands(known, now):
            return known.resource
        began = time.thread_time()
        job_id, steps = key
        with database.read() as session:
            job = session.get_one(models.JobRow, job_id)
            recorded = recorded_steps(
                session, job, max(1, min(steps, MOST_RANK_STEPS // job.topology.world_size))
            )
        resource = what_if(job, recorded)
        rest = max(REST * (time.thread_time() - began), LEAST_SECONDS)
        self._answers[key] = _CachedAnswer(now, self._clock() + rest, resource)
        self._answers.move_to_end(key)
        while len(self._answers) > JOBS_KEPT:
            self._answers.popitem(last=False)
        return resource


def what_if(job: models.JobRow, recorded: Recorded | None) -> schemas.WhatIf:
    if recorded is None:
        return resources.unknown_what_if(job, NO_STEP)
    if not recorded.timings:
        return resources.unknown_what_if(job, NOTHING_KEPT)
    metadata = {**recorded.placement.metadata, **job.spec.metadata}
    topology = recorded.placement.topology
    replay = RunReplay(recorded.timings, topology, metadata)
    advice = advise_step(_typical(recorded.timings), topology, metadata)
    return resources.what_if(job, replay, advice) or resources.unknown_what_if(job, NO_REPLAY)


def _typical(timings: list[StepTiming]) -> StepTiming:
    """Of the steps, the one whose duration is the median."""
    seconds = [float(np.max(timing.ranks.step_seconds, initial=0.0)) for timing in timings]
    return timings[int(np.argsort(seconds)[len(seconds) // 2])]
