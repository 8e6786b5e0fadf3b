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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from anyio import CapacityLimiter
from sqlalchemy.orm import Session

from paceline_server.api import resources, schemas
from paceline_server.api.problems import not_found
from paceline_server.api.recorded import RecordedSteps, recorded_steps
from paceline_server.decide.incidents import live_findings
from paceline_server.detect.bubble.pipeline_advice import advise_step
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import kind_of
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
# Number of requests that are answered or wait for an analysis at a time. Further ones wait without
# one of the threads that answer all other requests.
REQUESTS = 4
# Steps since a change of speed that are enough for an analysis.
LEAST_STEPS = 3
# Each step before a change of speed differs from each one after by more than this factor.
CHANGE = 1.05

NO_STEP = (
    "No step of this generation has finished yet. The analysis is available after the first one."
)
NOTHING_STORED = (
    "The last steps are not fully stored: a rank sent no data, or the data was pruned. Request the "
    "analysis while the job runs, or increase PACELINE_SERVER_LOG_RETENTION_SECONDS."
)
JUST_CHANGED = (
    "The job changed its speed at step {step}. The analysis is available a few steps later: steps "
    "from before the change do not describe the job now."
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
        self.limiter = CapacityLimiter(REQUESTS)  # for the threads that call `get`
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
        # An analysis from before an incident would contradict it.
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
            faults = _faults(session, job)
        resource = what_if(job, recorded, faults)
        cache_seconds = max(CACHE_FACTOR * (time.thread_time() - started), LEAST_SECONDS)
        self._answers[key] = _CachedAnswer(now, self._clock() + cache_seconds, resource)
        self._answers.move_to_end(key)
        while len(self._answers) > ANALYSES_CACHED:
            self._answers.popitem(last=False)
        return resource


def what_if(
    job: models.JobRow, recorded: RecordedSteps | None, faults: Sequence[Finding] = ()
) -> schemas.WhatIf:
    """Return the analysis of recorded steps; its verdict is `unknown` if there is no replay.

    Steps before the onset of a fault, or before a change of speed, are left out: advice from steps
    of both kinds would fit neither.

    Args:
        job: the job.
        recorded: its newest steps; None: it has finished none.
        faults: the open findings that a rank, a node or the network is slow.
    """
    if recorded is None:
        return resources.unknown_what_if(job, NO_STEP)
    if not recorded.timings:
        return resources.unknown_what_if(job, NOTHING_STORED)
    metadata = {**recorded.placement.metadata, **job.spec.metadata}
    topology = recorded.placement.topology
    onsets = [fault.onset_step for fault in faults if fault.onset_step is not None]
    timings = homogeneous(recorded.timings, onsets)
    if len(timings) < min(LEAST_STEPS, len(recorded.timings)):
        return resources.unknown_what_if(job, JUST_CHANGED.format(step=timings[0].step))
    replay = RunReplay(timings, topology, metadata)
    advice = advise_step(_typical(timings), topology, metadata)
    found = resources.what_if(job, replay, advice)
    if found is None:
        return resources.unknown_what_if(job, NO_REPLAY)
    return _with_faults(found, faults)


def homogeneous(timings: list[StepTiming], onsets: Collection[int]) -> list[StepTiming]:
    """Return the newest steps that have one speed: those since the last onset or change.

    One step of another speed at the end is left out: it may be a stall or an onset.
    """
    first = max((onset for onset in onsets if onset <= timings[-1].step), default=0)
    timings = [timing for timing in timings if timing.step >= first]
    seconds = np.array([_seconds(timing) for timing in timings])
    for cut in range(len(timings) - 1, 0, -1):
        before, after = seconds[:cut], seconds[cut:]
        if after.min() > CHANGE * before.max() or before.min() > CHANGE * after.max():
            return timings[cut:] if after.size > 1 else timings[:cut]
    return timings


def _with_faults(found: schemas.WhatIf, faults: Sequence[Finding]) -> schemas.WhatIf:
    """Return the analysis without the advice to move layers away from a stage that has a fault."""
    verdict = found.verdict
    fault = next((one for one in faults if verdict.target == f"stage {one.stage}"), None)
    if fault is None or verdict.kind != "stage_imbalance":
        return found
    cost = verdict.text.split(";")[0]
    repaired = schemas.WhatIfVerdict(
        kind="slow_worker", target=verdict.target, text=f"{cost}; {fault.summary}"
    )
    return found.model_copy(update={"verdict": repaired})


def _typical(timings: list[StepTiming]) -> StepTiming:
    """Return the step with the median duration."""
    seconds = [_seconds(timing) for timing in timings]
    return timings[int(np.argsort(seconds)[len(seconds) // 2])]


def _seconds(timing: StepTiming) -> float:
    return float(np.max(timing.ranks.step_seconds, initial=0.0))


def _faults(session: Session, job: models.JobRow) -> list[Finding]:
    """Return the open findings that a rank, a node or the network has become slow."""
    return [
        finding
        for incident in queries.open_incidents(session, job.id)
        for finding in live_findings(incident.view)
        if finding.generation == job.generation
        and kind_of(finding.kind).is_slow_fault
        and finding.persistence not in ("transient", "chronic")
    ]
