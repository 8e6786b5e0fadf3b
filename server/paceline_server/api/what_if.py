"""What-if analysis of a job's newest steps, computed on request and cached.

Reading and replaying the steps of a large job takes about one second of one core. An analysis is
therefore cached until a newer step exists, and long enough to keep the cost below 5% of a core for
any number of clients, unless an incident opens or is resolved. For large jobs fewer steps are
replayed.
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
from paceline_server.api.recorded import RecordedSteps, recorded_steps
from paceline_server.detect.bubble.pipeline_advice import advise_step
from paceline_server.steps.timing import StepTiming
from paceline_server.store import models, queries
from paceline_server.store.database import Database
from paceline_server.whatif.online import RunReplay

# Limit on steps times ranks replayed for one analysis.
MOST_RANK_STEPS = 8192
# An analysis is cached for this multiple of the CPU time it took, and at least LEAST_SECONDS.
CACHE_FACTOR = 20.0
LEAST_SECONDS = 2.0
ANALYSES_CACHED = 64

NO_STEP = (
    "No step of this generation has finished yet. The analysis is available after the first one."
)
NOTHING_STORED = (
    "The last steps are not fully stored: a rank sent no data, or the data was pruned. Request the "
    "analysis while the job runs, or increase PACELINE_SERVER_LOG_RETENTION_SECONDS."
)
NO_REPLAY = (
    "The last steps cannot be replayed: a stage has no recorded forward or backward pass, or the "
    "recorded operations do not add up to the step. The hooks must record every microbatch of "
    "every stage."
)


@dataclass(frozen=True)
class _JobVersion:
    """State that an analysis depends on; a change invalidates it."""

    generation: int
    step: int | None  # the newest
    incident_id: str | None  # the newest open incident


@dataclass(frozen=True)
class _CachedAnswer:
    version: _JobVersion  # at the time of the analysis
    fresh_until: float
    resource: schemas.WhatIf


class WhatIfCache:
    """Cached analyses by job. One is computed at a time; meanwhile the previous one is served."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._computing = threading.Lock()
        self._answers: OrderedDict[tuple[str, int], _CachedAnswer] = OrderedDict()

    def get(self, database: Database, job_id: str, steps: int) -> schemas.WhatIf:
        """Return the analysis of a job's last `steps` steps. Raises ProblemError if unknown."""
        key = (job_id, steps)
        with database.read() as session:
            job = session.get(models.JobRow, job_id) if "\0" not in job_id else None
            if job is None:
                raise not_found("job", job_id)
            newest = queries.steps(session, job_id, None, 1, job.generation)
            incident = queries.worst_open_incident(session, job_id)
            now = _JobVersion(
                generation=job.generation,
                step=newest[0].step if newest else None,
                incident_id=None if incident is None else incident.id,
            )
        cached = self._answers.get(key)
        if cached is not None and self._is_fresh(cached, now):
            return cached.resource
        # While another request computes, the previous analysis of the same generation is served.
        is_usable = cached is not None and cached.version.generation == now.generation
        if not self._computing.acquire(blocking=not is_usable):
            assert cached is not None
            return cached.resource
        try:
            return self._compute(database, key, now)
        finally:
            self._computing.release()

    def _is_fresh(self, answer: _CachedAnswer, now: _JobVersion) -> bool:
        version = answer.version
        # An analysis from before an incident would contradict the incident.
        if (version.generation, version.incident_id) != (now.generation, now.incident_id):
            return False
        return version.step == now.step or self._clock() < answer.fresh_until

    def _compute(
        self, database: Database, key: tuple[str, int], now: _JobVersion
    ) -> schemas.WhatIf:
        cached = self._answers.get(key)  # computed while this request waited
        if cached is not None and self._is_fresh(cached, now):
            return cached.resource
        started = time.thread_time()
        job_id, steps = key
        with database.read() as session:
            job = session.get_one(models.JobRow, job_id)
            recorded = recorded_steps(
                session, job, max(1, min(steps, MOST_RANK_STEPS // job.topology.world_size))
            )
        resource = what_if(job, recorded)
        cache_seconds = max(CACHE_FACTOR * (time.thread_time() - started), LEAST_SECONDS)
        self._answers[key] = _CachedAnswer(now, self._clock() + cache_seconds, resource)
        self._answers.move_to_end(key)
        while len(self._answers) > ANALYSES_CACHED:
            self._answers.popitem(last=False)
        return resource


def what_if(job: models.JobRow, recorded: RecordedSteps | None) -> schemas.WhatIf:
    """Return the analysis of recorded steps; its verdict is `unknown` if there is no replay."""
    if recorded is None:
        return resources.unknown_what_if(job, NO_STEP)
    if not recorded.timings:
        return resources.unknown_what_if(job, NOTHING_STORED)
    metadata = {**recorded.placement.metadata, **job.spec.metadata}
    topology = recorded.placement.topology
    replay = RunReplay(recorded.timings, topology, metadata)
    advice = advise_step(_typical(recorded.timings), topology, metadata)
    return resources.what_if(job, replay, advice) or resources.unknown_what_if(job, NO_REPLAY)


def _typical(timings: list[StepTiming]) -> StepTiming:
    """Return the step with the median duration."""
    seconds = [float(np.max(timing.ranks.step_seconds, initial=0.0)) for timing in timings]
    return timings[int(np.argsort(seconds)[len(seconds) // 2])]
