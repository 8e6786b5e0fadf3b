"""The engine's state of the running generation, dropped with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from msgspec.structs import replace as replace_fields

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding, cleared
from paceline_server.detect.hang.operation_text import operation_text
from paceline_server.detect.kinds import LOSS, SLOW_LINK, STRAGGLER, Kind, kind_of
from paceline_server.detect.observation import (
    EarlierRank,
    Generation,
    LiveRank,
    Observation,
    ReportedDeviceEvent,
    ReportedExit,
)
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.recent import RecentRecords
from paceline_server.detect.reporting import cost_of
from paceline_server.detect.telemetry import Telemetry
from paceline_server.engine.clocks import ReportedTime
from paceline_server.engine.definitions import DefinitionLog, Definitions
from paceline_server.engine.losses import LossJoin
from paceline_server.engine.reported_topology import ReportedTopology, may_replace
from paceline_server.engine.types import Placement, RankProgress
from paceline_server.medians import quantile
from paceline_server.policy import Policy
from paceline_server.steps.efficiency import MeasuredStep, efficiency
from paceline_server.steps.first_steps import FirstSteps
from paceline_server.steps.model import FinishedStep, StepModel
from paceline_server.steps.timing import RankTimes, StepTiming
from paceline_server.steps.types import Efficiency, StepSummary, UsualStep
from paceline_server.whatif.goodput import step_goodput
from paceline_server.whatif.online import RunReplay
from paceline_wire.batch import (
    Batch,
    DeviceEvent,
    RankAttached,
    RankDefined,
    RankDump,
    RankExited,
    RankProfile,
    RankStackTraces,
    RankState,
)
from paceline_wire.metadata import OPTIMIZER_SINCE_STEP, TRAINED_SINCE_STEP
from paceline_wire.ring import SectionDefinition
from paceline_wire.stacks import bounded, bounded_profile, plain

RECENT_STEPS = 20  # steps in the typical step time that is displayed
P99_STEPS = 200
PAUSES = 64  # newest evaluations and checkpoints that are remembered
_LEAST_PAUSE_SECONDS = 1.0
_STEPS_BEFORE_PAUSE = 8
_PAUSE_RATIO = 10.0  # multiple of the steps before that is no slow step, but a pause
SAVED_STEPS = 9  # checkpoints whose median interval is taken
# Steps for the what-if replay: enough to distinguish a fault from noise, in tables of bounded size
# (a row has about 100 bytes).
REPLAYED_STEPS = 8
_EARLIER_RANKS = 1024  # most ranks of earlier runs that are remembered
_STEP_DIGITS = 18  # a described step with more digits is malformed
_CRITICAL_COST = 0.1  # a slowdown that costs less is not critical
REPLAYED_ROWS = 1 << 21
TIMED_STEPS = 1024  # whose start and end are kept
PROFILES = 4  # newest samples of the stacks of each rank that are kept


class RunningGeneration:
    """Routes the events of one generation to the step model and the detectors."""

    def __init__(
        self,
        job_id: str,
        placement: Placement,
        policy: Policy,
        detectors: Sequence[type[Detector]],
        earlier: UsualStep | None = None,
    ) -> None:
        self.placement = placement
        self.generation = Generation(
            job=job_id,
            number=placement.generation,
            topology=placement.topology,
            nodes=dict(placement.nodes),
            gpus=dict(placement.gpus),
            started_ns=placement.started_ns,
            earlier=earlier,
        )
        self._job = job_id
        # that a rank of this run reports
        self._lowest_generation = min(
            (placement.generation, *placement.reported_generations.values())
        )
        self._policy = policy
        self._world_size = placement.topology.world_size
        self.model = StepModel(placement.generation, placement.topology, placement.metadata)
        self._detectors = [detector(self.generation, policy) for detector in detectors]
        self._reported_topology = ReportedTopology(self._world_size)
        self._cleared: list[Finding] = []  # because the topology or the model changed
        # First steps, not yet finished, of another model and of another optimizer.
        self._other_model_step: int | None = None
        self._other_optimizer_step: int | None = None
        self.has_several_models = False  # trained one after the other
        self._detected_since = 0  # steps before it are no longer for the detectors
        self._ranks: dict[int, LiveRank] = {}
        self._exited: dict[int, RankExited] = {}
        self._stacks: dict[int, RankStackTraces] = {}
        self._profiles: dict[int, deque[RankProfile]] = {}
        self._dumps: dict[int, RankDump] = {}
        self._records = RecentRecords(placement.topology.world_size)
        self.attached: dict[str, ReportedTime] = {}  # by node: when its first rank attached
        self._exit_times: dict[int, ReportedTime] = {}
        self._earlier: dict[tuple[str, int, int], EarlierRank] = {}  # by node, generation, rank
        self._new_exits: list[ReportedExit] = []
        self._new_device_events: list[ReportedDeviceEvent] = []
        self._sections: dict[tuple[int, int], str] = {}
        self._defined = DefinitionLog(placement)
        self._losses: dict[int, tuple[int, float]] = {}
        self._joined = LossJoin()
        self._measured: deque[MeasuredStep] = deque(maxlen=RECENT_STEPS)
        self._durations: deque[float] = deque(maxlen=P99_STEPS)
        self._moved = set(range(placement.topology.world_size))
        self._new_timings: list[StepTiming] = []
        self._pauses: deque[tuple[int, int]] = deque(maxlen=PAUSES)
        self._recent: deque[StepTiming] = deque()
        self._replay = RunReplay((), self.generation.topology, {})
        self._active_findings: dict[str, Finding] = {}  # by fingerprint
        self._new_onsets: list[int] = []  # onset of each straggler found in the last tick
        self._steps_finished = 0
        self._first_steps = FirstSteps(placement.generation)
        self.first_step: int | None = None  # that all ranks finished
        self.step_times: dict[int, tuple[int, int]] = {}  # start and end of the recent steps
        self._blocked_seconds: deque[float] = deque(maxlen=SAVED_STEPS)  # by recent checkpoints
        self._saved_steps: deque[int] = deque(maxlen=SAVED_STEPS)  # newest complete checkpoints
        self._saving_steps: deque[int] = deque(maxlen=SAVED_STEPS)  # made until each was complete

    def feed(self, batch: Batch, received_ns: int, clock_shift_ns: int) -> None:
        for event in batch.events:
            match event:
                case RankState():
                    if self._is_ours(event, batch.agent_id):
                        self._add_state(event, received_ns)
                    elif self._is_earlier_run(event):
                        self._add_earlier(event, batch.agent_id, received_ns)
                case RankDefined():
                    if self._is_ours(event, batch.agent_id):
                        self._define(event)
                case RankExited():
                    if self._is_ours(event, batch.agent_id):
                        self._add_exit(event, batch.agent_id, received_ns, clock_shift_ns)
                case RankDump():
                    if self._is_ours(event, batch.agent_id):
                        self._dumps[event.rank] = event
                case RankStackTraces():
                    if self._is_ours(event, batch.agent_id):
                        self._add_stacks(event)
                case RankProfile():
                    if self._is_ours(event, batch.agent_id):
                        self._add_profile(event, clock_shift_ns)
                case RankAttached(identity=identity):
                    claimed = identity.job, identity.generation, identity.rank
                    if self._is_generation(*claimed) and self._holds(identity.rank, batch.agent_id):
                        self._add_metadata(identity.metadata)
                        self._reported_topology.add_identity(identity)
                        attached = ReportedTime(batch.agent_id, event.time_ns, received_ns)
                        self.attached.setdefault(batch.agent_id, attached)
                case DeviceEvent():
                    shifted = replace_fields(event, time_ns=event.time_ns + clock_shift_ns)
                    self._new_device_events.append(ReportedDeviceEvent(shifted, batch.agent_id))
                case _:
                    pass
        for block in batch.spans:
            is_ours = self._is_generation(block.job, block.generation, block.rank)
            if is_ours and self._holds(block.rank, batch.agent_id):
                self.model.add(block, clock_shift_ns)
                self._records.add(block)

    def _is_ours(
        self,
        event: RankState | RankDefined | RankExited | RankStackTraces | RankProfile | RankDump,
        agent_id: str,
    ) -> bool:
        is_generation = self._is_generation(event.job, event.generation, event.rank)
        return is_generation and self._holds(event.rank, agent_id)

    def _is_generation(self, job: str, generation: int, rank: int) -> bool:
        return job == self._job and generation == self.placement.reported_generation(rank)

    def _is_earlier_run(self, state: RankState) -> bool:
        """Return whether a live rank of a run that the launcher restarted reports its state."""
        if self.placement.launch is None or state.job != self._job:
            return False
        is_alive = state.process_state not in (None, "Z")
        return is_alive and state.generation < self._lowest_generation

    def _add_earlier(self, state: RankState, agent_id: str, received_ns: int) -> None:
        key = agent_id, state.generation, state.rank
        if key in self._earlier or len(self._earlier) < _EARLIER_RANKS:
            self._earlier[key] = EarlierRank(
                node=agent_id,
                rank=state.rank,
                generation=state.generation,
                step=state.view.step,
                received_ns=received_ns,
            )

    def _holds(self, rank: int, agent_id: str) -> bool:
        """Return whether the rank was placed on this node: only it may report the rank."""
        if not 0 <= rank < self._world_size:
            return False
        return self.placement.nodes.get(rank, agent_id) == agent_id

    def _add_state(self, state: RankState, received_ns: int) -> None:
        self._ranks.setdefault(state.rank, LiveRank(state.rank)).update(state, received_ns)
        self._moved.add(state.rank)
        view = state.view
        self._joined.add_state(view)
        if view.loss_step is None or view.loss is None:
            return
        previous_step, _ = self._losses.get(state.rank, (-1, 0.0))
        if view.loss_step >= previous_step:
            self._losses[state.rank] = (view.loss_step, view.loss)

    def restore(self, definitions: Definitions) -> None:
        """Add what the ranks defined before this process received their batches."""
        self._add_metadata(definitions.metadata)
        for event in definitions.events(self._job, self.placement):
            self._define(event)

    def _add_metadata(self, metadata: dict[str, str]) -> None:
        self.model.describe(metadata)
        self._defined.describe(metadata)

    @property
    def definitions(self) -> Definitions:
        """Definitions that the ranks have reported so far."""
        return self._defined.definitions

    def _define(self, event: RankDefined) -> None:
        self._defined.add(event)
        self.model.define(event)
        for definition in event.definitions:
            if isinstance(definition, SectionDefinition):
                self._sections[event.rank, definition.id] = definition.name
        for description in event.descriptions:
            self._reported_topology.add_description(event.rank, description)
            if event.rank == 0:
                self._note_trainings(description.metadata)

    def _note_trainings(self, metadata: Mapping[str, str]) -> None:
        model, optimizer = metadata.get(TRAINED_SINCE_STEP), metadata.get(OPTIMIZER_SINCE_STEP)
        if model is not None and model.isdecimal():
            self._other_model_step = int(model[:_STEP_DIGITS])
        if optimizer is not None and optimizer.isdecimal():
            self._other_optimizer_step = int(optimizer[:_STEP_DIGITS])

    def _add_stacks(self, event: RankStackTraces) -> None:
        self._stacks[event.rank] = replace_fields(
            event,
            threads=bounded(event.threads),
            error=None if event.error is None else plain(event.error),
        )

    def _add_profile(self, event: RankProfile, clock_shift_ns: int) -> None:
        if event.error is not None:
            return
        profile = replace_fields(
            event,
            time_ns=event.time_ns + clock_shift_ns,
            begun_ns=event.begun_ns + clock_shift_ns,
            main=bounded_profile(event.main),
            workers=bounded_profile(event.workers),
        )
        self._profiles.setdefault(event.rank, deque(maxlen=PROFILES)).append(profile)

    def _add_exit(
        self, event: RankExited, agent_id: str, received_ns: int, clock_shift_ns: int
    ) -> None:
        if event.rank not in self._exited:
            self._exited[event.rank] = event
            self._exit_times[event.rank] = ReportedTime(agent_id, event.time_ns, received_ns)
            self._moved.add(event.rank)
            time_ns = event.time_ns + clock_shift_ns
            self._new_exits.append(ReportedExit(event, agent_id, time_ns, received_ns))

    @property
    def exit_times(self) -> Collection[ReportedTime]:
        """The exits of all ranks; empty while one of them runs."""
        return self._exit_times.values() if len(self._exit_times) == self._world_size else ()

    def take_steps(self, now_ns: int) -> list[StepSummary]:
        """Return the steps closed since the last call, for the detectors and the ledger."""
        self._relocate(now_ns)
        finished = self.model.take_finished()
        self._begin_trainings(finished, now_ns)
        self._new_timings = [timing for _, timing in finished]
        self._remember(self._new_timings)
        self._measured += [MeasuredStep.of(step, timing.ranks) for step, timing in finished]
        steps = [self._with_goodput(summary, timing) for summary, timing in finished]
        for summary, timing in zip(steps, self._new_timings, strict=True):
            duration_ns = int(summary.duration_seconds * 1e9)
            times = summary.started_ns, summary.started_ns + duration_ns
            if self._is_pause(summary.duration_seconds, timing.ranks):
                self._pauses.append(times)
            self._durations.append(summary.duration_seconds)
            self.step_times[summary.step] = times
            if len(self.step_times) > TIMED_STEPS:
                del self.step_times[next(iter(self.step_times))]
            self._joined.add(summary, now_ns)
        self._steps_finished += sum(1 + step.skipped for step in steps)
        self._first_steps.add(steps, self.generation.topology)
        blocked = [timing.ranks.checkpoint_seconds.max(initial=0.0) for _, timing in finished]
        self._blocked_seconds += [float(seconds) for seconds in blocked if seconds > 0.0]
        if steps and self.first_step is None:
            self.first_step = steps[0].step
        return steps

    def _is_pause(self, seconds: float, ranks: RankTimes) -> bool:
        """Return whether most of a step is an evaluation or a checkpoint.

        Also if it takes many times as long as those before it: not all of them are recognized.
        """
        if seconds < _LEAST_PAUSE_SECONDS:
            return False
        paused = ranks.checkpoint_seconds + ranks.evaluation_seconds + ranks.evaluation_wait_seconds
        before = list(self._durations)[-_STEPS_BEFORE_PAUSE:]
        usual = median(before) if before else math.inf
        return 2.0 * paused.max(initial=0.0) >= seconds or seconds >= _PAUSE_RATIO * usual

    def _with_goodput(self, summary: StepSummary, timing: StepTiming) -> StepSummary:
        topology, metadata = self.generation.topology, self.model.metadata
        least = self._policy.straggler_slowdown
        links = [
            finding.cost_ratio or 0.0
            for finding in self._active_findings.values()
            if finding.kind == SLOW_LINK.name
        ]
        cost = max(links, default=0.0)
        stragglers = {
            rank: finding.slowdown or 1.0
            for finding in filter(_is_straggler, self._active_findings.values())
            for rank in _stragglers([finding])
        }
        goodput = step_goodput(summary, timing, topology, metadata, least, stragglers, cost)
        return replace_fields(summary, goodput=goodput)

    def _relocate(self, now_ns: int) -> None:
        """Adopt the topology that all ranks report, which they may recognize after they began.

        What was measured with another one is dropped: it compares ranks that are no peers.
        """
        reported, before = self._reported_topology.take(), self.placement
        if reported is None or reported == before.topology:
            return
        was_requested = not before.was_found and before.topology_source is None
        if was_requested and not may_replace(before.topology, reported):
            return
        source = self._reported_topology.source
        self.placement = replace_fields(before, topology=reported, topology_source=source)
        self.generation = replace(self.generation, topology=reported)
        self.model.relocate(reported)
        self._forget_steps()
        self._begin_detection(_is_any)
        self._clear("The ranks have other peers than it seemed.", now_ns, _is_slow)

    def _begin_trainings(self, finished: Sequence[FinishedStep], now_ns: int) -> None:
        """Compare no more with what the same processes trained before, once a step of it is there.

        A step of another model may take several times as long. Its loss begins high again, as does
        that of the same model with another optimizer.
        """
        newest = max((timing.step for _, timing in finished), default=-1)
        model, optimizer = self._other_model_step, self._other_optimizer_step
        if optimizer is not None and optimizer <= newest:
            self._other_optimizer_step = None
            self._begin_detection(_is_of_loss)
            self._clear("The same processes use another optimizer.", now_ns, _is_of_loss)
        if model is not None and model <= newest:
            self._other_model_step, self._detected_since = None, model
            self.has_several_models = True
            self.generation = replace(self.generation, earlier=None)
            self._first_steps = FirstSteps(self.generation.number)
            self._forget_steps()
            self._begin_detection(_is_of_model)
            self._clear("The same processes train another model.", now_ns, _is_of_model)

    def _forget_steps(self) -> None:
        self._recent.clear()
        self._replay = RunReplay((), self.generation.topology, {})

    def _begin_detection(self, concerns: Callable[[Kind], bool]) -> None:
        """Replace the detectors of such kinds: they forget what they have measured."""
        self._detectors = [
            type(detector)(self.generation, self._policy)
            if any(map(concerns, detector.kinds))
            else detector
            for detector in self._detectors
        ]

    def _clear(self, summary: str, now_ns: int, concerns: Callable[[Kind], bool]) -> None:
        """Clear the findings of such kinds."""
        for fingerprint, finding in list(self._active_findings.items()):
            if concerns(kind_of(finding.kind)):
                del self._active_findings[fingerprint]
                self._cleared.append(cleared(finding, summary, now_ns, finding.step))

    def _remember(self, timings: list[StepTiming]) -> None:
        self._recent += timings
        rows = sum(timing.rows for timing in self._recent)
        while len(self._recent) > REPLAYED_STEPS or (
            rows > REPLAYED_ROWS and len(self._recent) > 1
        ):
            rows -= self._recent.popleft().rows

    def take_complete(self, now_ns: int | None) -> list[StepSummary]:
        """Return steps with their loss, for users; all waiting steps if `now_ns` is None."""
        return self._joined.take(now_ns)

    def detect(
        self,
        now_ns: int,
        steps: list[StepSummary],
        last_seen_ns: Mapping[str, int],
        others_seen_ns: int,
        lateness_ns: Mapping[str, int],
        telemetry: Telemetry,
    ) -> list[Finding]:
        exits, self._new_exits = self._new_exits, []
        device_events, self._new_device_events = self._new_device_events, []
        timings, self._new_timings = self._new_timings, []
        if self._detected_since:
            steps = [step for step in steps if step.step >= self._detected_since]
            timings = [timing for timing in timings if timing.step >= self._detected_since]
            self._detected_since = 0
        if timings:  # results of the previous replay are outdated
            self._replay = RunReplay(
                tuple(self._recent), self.generation.topology, self.model.metadata
            )
        observation = Observation(
            now_ns=now_ns,
            steps=steps,
            exits=exits,
            device_events=device_events,
            ranks=self._ranks,
            last_seen_ns=last_seen_ns,
            others_seen_ns=others_seen_ns,
            pauses=tuple(self._pauses),
            lateness_ns=lateness_ns,
            exited=self._exited,
            losses=self._losses,
            telemetry=telemetry,
            groups=self.model.groups,
            sections=self._sections,
            step_seconds=median(self._durations) if self._durations else None,
            step_seconds_p99=self._step_seconds_p99(),
            steps_finished=self._steps_finished,
            usual_step=self.usual_step,
            stacks=self._stacks,
            profiles=self._profiles,
            dumps=self._dumps,
            records=self._records,
            earlier_ranks=tuple(self._earlier.values()),
            timings=timings,
            replay=self._replay,
            metadata=self.model.metadata,
        )
        findings, self._cleared = self._cleared, []
        hidden = 1.0
        for detector in self._detectors:
            observation = replace(
                observation,
                hidden_slowdown=hidden,
                stragglers=frozenset(_stragglers(self._active_findings.values())),
                active=tuple(self._active_findings.values()),
            )
            found = detector.update(observation)
            hidden = max(hidden, detector.hidden_slowdown)
            for finding in found:
                before = self._active_findings.pop(finding.fingerprint, None)
                if not finding.cleared:
                    self._active_findings[finding.fingerprint] = finding
                    if before is None and _is_straggler(finding):
                        self._new_onsets.append(finding.onset_step or 0)
            # Ranks that hide each other may be found in the same tick.
            findings += [self._weighed(finding) for finding in found]
        return findings

    def take_straggler_onset(self) -> int | None:
        """Return the first step in which one of the stragglers that are new was slow."""
        onsets, self._new_onsets = self._new_onsets, []
        return min(onsets, default=None)

    def _weighed(self, finding: Finding) -> Finding:
        """Return the finding with a lower severity if it costs too little for an alert or an
        action.

        A replay may show that other ranks are as late, so that less is gained than lost.
        """
        costs = [finding.cost_ratio, cost_of(finding.speedup)]
        cost = min((known for known in costs if known is not None), default=None)
        if cost is None or kind_of(finding.kind).effect != "slow":
            return finding
        hidden = self._cost_beside_others(finding)
        if hidden is not None and hidden[0] >= max(_CRITICAL_COST, cost):
            cost, note = hidden
            finding = replace_fields(finding, summary=f"{finding.summary} {note}")
        if cost < self._policy.notable_cost_share:
            return replace_fields(finding, severity="info")
        if cost < _CRITICAL_COST and finding.severity == "critical":
            return replace_fields(finding, severity="warning")
        return finding

    def _cost_beside_others(self, finding: Finding) -> tuple[float, str] | None:
        """Return the share of step time that a repair saves if the other slow ranks are repaired
        too, beyond what those alone save, and the sentence that reports it.

        Ranks that are about equally slow hide each other: the repair of only one gains nothing.
        """
        own = set(_stragglers([finding]))
        others = set(
            _stragglers(
                other
                for other in self._active_findings.values()
                if other.persistence == "persistent" and other.fingerprint != finding.fingerprint
            )
        )
        if finding.cleared or not own or not others - own:
            return None
        together = self._replay.speedup(ranks=own | others)
        saved, saved_by_others = cost_of(together), cost_of(self._replay.speedup(ranks=others))
        if saved is None or saved_by_others is None:
            return None
        note = f"With {ranks_text(others - own)} fixed as well, it gives {together:.2f}x."
        return saved - saved_by_others, note

    @property
    def usual_step(self) -> UsualStep | None:
        """The typical of the first steps; None before enough have finished."""
        return self._first_steps.usual

    def step_seconds(self) -> float | None:
        """Return the median of the recent steps, each the mean of its ranks."""
        recent = [step.duration_seconds for step in self._measured]
        return median(recent) if recent else None

    def efficiency(self) -> Efficiency:
        """Return the efficiency over the recent steps."""
        model = self.model
        return efficiency(self._measured, model.metadata, model.values, self._world_size)

    def can_checkpoint(self) -> bool | None:
        """Return whether all ranks save a checkpoint on command; None if not all have begun a step.

        Scripts declare it before their first step.
        """
        states = [live.state for live in self._ranks.values() if live.state is not None]
        begun = [state for state in states if state.view.step_started_ns]
        if len(begun) < self._world_size:
            return None
        return all(state.view.can_checkpoint for state in begun)

    def saved_step(self) -> int | None:
        """Return the newest checkpoint reported by all ranks that report checkpoints."""
        states = [live.state for live in self._ranks.values() if live.state is not None]
        steps = [state.view.saved_step for state in states]
        newest = min((step for step in steps if step is not None), default=None)
        if newest is not None and newest > max(self._saved_steps, default=-1):
            self._saved_steps.append(newest)
            finished = [self.model.newest_step(rank) for rank in self._ranks]
            reached = max((step + 1 for step in finished if step is not None), default=newest)
            self._saving_steps.append(max(0, reached - newest))
        return newest

    def checkpoint_seconds(self) -> float | None:
        """Return how long a checkpoint usually blocks the slowest rank."""
        return median(self._blocked_seconds) if self._blocked_seconds else None

    def checkpoint_interval_steps(self) -> int | None:
        """Return the usual number of steps between two checkpoints; None before the second."""
        intervals = [after - before for before, after in pairwise(self._saved_steps)]
        return round(median(intervals)) if intervals else None

    def checkpoint_saving_steps(self) -> int | None:
        """Return how many steps are usually made until an asynchronous checkpoint is complete."""
        return round(median(self._saving_steps)) if self._saving_steps else None

    def _step_seconds_p99(self) -> float | None:
        return quantile(self._durations, 0.99) if self._durations else None

    def progress(self) -> list[RankProgress]:
        """Return the progress of the ranks that have changed since the last call."""
        self._moved.update(self.model.take_moved())
        moved, self._moved = sorted(self._moved), set()
        return [self._rank_progress(rank) for rank in moved]

    def _rank_progress(self, rank: int) -> RankProgress:
        live = self._ranks.get(rank)
        state = live.state if live is not None else None
        step = self.model.newest_step(rank)
        if state is None:
            return RankProgress(rank, step, None, None, None, "unknown")
        frame = state.view.frames[-1] if state.view.frames else None
        status = state.view.status
        if status == "starting" and self.model.has_no_steps(rank):
            status = "running"  # as a generator: no step of its own begins
        if frame is None or rank in self._exited:
            return RankProgress(rank, step, None, None, state.process_state, status)
        seconds = (state.time_ns - state.clock_offset_ns - frame.start_ns) / 1e9
        return RankProgress(
            rank=rank,
            step=step,
            operation=operation_text(rank, frame, self.model.groups, self._sections),
            operation_seconds=max(seconds, 0.0),
            process_state=state.process_state,
            status=status,
        )


def _is_any(_: Kind) -> bool:
    return True


def _is_slow(kind: Kind) -> bool:
    return kind.effect == "slow"


def _is_of_loss(kind: Kind) -> bool:
    return kind is LOSS


def _is_of_model(kind: Kind) -> bool:
    """Return whether findings of this kind compare with earlier steps of the same model."""
    return _is_slow(kind) or _is_of_loss(kind)


def _is_straggler(finding: Finding) -> bool:
    return finding.kind == STRAGGLER.name and finding.persistence == "persistent"


def _stragglers(findings: Iterable[Finding]) -> Iterator[int]:
    for finding in findings:
        if kind_of(finding.kind).names_ranks:
            yield from finding.ranks
            if finding.rank is not None:
                yield finding.rank
