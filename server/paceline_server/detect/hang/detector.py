"""Detect a hung job and name the rank that blocks it.

A job hangs if the state page of every living rank has been unchanged for long enough, in recent
reports. The limit is three times the usual duration of the culprit's operation, and at least two
steps or 20 s; less if a process is stopped or gone, which is certain; more while the job starts,
evaluates or saves a checkpoint, and on a host on which ranks wait for CPUs. A start that waits for
a rank (`late_start`) is a warning first. Ranks that may run code of the script that records
nothing, such as an evaluation, are reported for information first.

The verdict has three steps, one module each: who waits for whom (`wait_for_graph`), who is to blame
(`culprit`), and why (`verdict`); `sentences` writes the summary. After the first report the
detector asks for the Python stacks of the culprit and of one rank that waits for it, and for the
Flight Recorder dumps of all ranks. It reports the hang again when they arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.collective_timeout import names_timeout
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.hang.culprit import Culprits, find_culprits
from paceline_server.detect.hang.late_start import (
    LateStart,
    late_start,
    late_summary,
    late_verdict,
)
from paceline_server.detect.hang.python_stacks import (
    awaited_worker,
    cause_with_stacks,
    creates_group,
    stack_evidence,
    user_frame,
)
from paceline_server.detect.hang.rank_cause import (
    BUSY_CPU_SHARE,
    GONE_STATES,
    STOPPED_STATES,
    side_of,
)
from paceline_server.detect.hang.sentences import (
    ENDED_BY_ERROR,
    PAUSE_ADVICE,
    RESUMED,
    hang_summary,
    pause_summary,
)
from paceline_server.detect.hang.settings import DEFAULTS, HangSettings
from paceline_server.detect.hang.step_program import RankProgram, program_of
from paceline_server.detect.hang.verdict import (
    MISMATCH,
    HangVerdict,
    has_finished,
    stopped_verdict,
    verdict_on,
)
from paceline_server.detect.hang.wait_for_graph import innermost_op
from paceline_server.detect.host_load import OF_PRESSURE, pressure_share, usual_wait_share
from paceline_server.detect.interrupt import is_interrupt
from paceline_server.detect.kinds import HANG, Kind, Severity
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.recent import p99_seconds
from paceline_server.flight_recorder.received import conclude, read
from paceline_server.policy import Policy
from paceline_wire.batch import RankDump, RankStackTraces
from paceline_wire.ring import StateView
from paceline_wire.spans import SECTION_BASE, Op
from paceline_wire.stacks import StackFrame

MAX_RANKS_FOR_DUMPS = 512  # reading a dump takes some milliseconds of the job's worker
DUMP_TIMEOUT_NS = 4_000_000_000  # PyTorch polls for the request once a second, then writes
_LONGEST_END_SECONDS = 5.0  # from the error that leaves the loop to the exit of its process
_MAX_STACKS = 8  # ranks whose stacks are read
_MAX_RANKS_TIMED = 8  # the usual duration of an operation is similar on all ranks of a group


@dataclass(frozen=True, slots=True)
class _ExpectedRanks:
    """The ranks that should make progress."""

    live: list[LiveRank]  # with a recent state page
    without_page: frozenset[int]  # ranks without a recent page, although their node sends batches

    @property
    def statuses(self) -> set[str]:
        return {live.state.view.status for live in self.live if live.state}

    @property
    def views(self) -> dict[int, StateView]:
        return {live.rank: live.state.view for live in self.live if live.state}

    @property
    def frozen_seconds(self) -> float:
        return min(live.apparently_frozen_seconds for live in self.live)


@dataclass(slots=True)
class _Cache:
    """Results that stay valid while no rank makes progress."""

    without_page: frozenset[int] | None = None  # ranks for which `culprits` holds; None: not set
    culprits: Culprits | None = None
    usual_seconds: dict[tuple[int, int], float | None] = field(default_factory=dict)  # rank, op
    programs: dict[int, RankProgram | None] = field(default_factory=dict)


class HangDetector(Detector):
    """Finding kind `hang`, fingerprint `hang`."""

    kinds: ClassVar[tuple[Kind, ...]] = (HANG,)
    order: ClassVar[int] = 40

    def __init__(
        self, generation: Generation, policy: Policy, settings: HangSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._active: Finding | None = None
        self._late: LateStart | None = None  # the active finding is about it
        self._limit: float | None = None  # seconds until the active information is a hang
        self._cache = _Cache()
        self._earlier_stacks: dict[int, RankStackTraces] = {}  # read before this hang
        self._earlier_dumps: dict[int, RankDump] = {}
        self._frame: StackFrame | None = None  # in the active finding's summary
        self._detected_ns = 0
        self._frozen_since_ns = 0
        # By culprits: the longest of their hangs that ended by itself, in seconds.
        self._pauses: dict[tuple[int, ...], float] = {}

    def update(self, observation: Observation) -> list[Finding]:
        if self._active is None and self._makes_progress(observation):
            self._cache = _Cache()
            return []
        ranks = self._expected_ranks(observation)
        if ranks is None:
            return self._clear_on_error(observation) or self._escalate_after_timeout(observation)
        if self._active is not None:
            ending = self._ending_seconds(self._active, ranks, observation)
            if ending is not None and ending < _LONGEST_END_SECONDS:
                return []
            return (
                self._clear_on_progress(ranks, observation)
                or self._escalate_late_start(ranks, observation)
                or self._escalate_pause(ranks, observation)
                or self._add_stacks(observation)
                or self._add_dumps(ranks, observation)
            )
        self._limit = None
        verdict = self._stopped_processes(ranks, observation)
        self._late = None if verdict is not None else self._late_ranks(ranks, observation)
        if self._late is not None:
            verdict = late_verdict(self._late, ranks.live)
        verdict = verdict or self._blocked_ranks(ranks, observation)
        if verdict is None:
            return []
        return self._report(verdict, ranks, observation)

    def _report(
        self, verdict: HangVerdict, ranks: _ExpectedRanks, observation: Observation
    ) -> list[Finding]:
        self._active = self._hang(verdict, ranks, observation)
        self._earlier_stacks = dict(observation.stacks)
        self._earlier_dumps = dict(observation.dumps)
        self._detected_ns = observation.now_ns
        self._frozen_since_ns = observation.now_ns - int(ranks.frozen_seconds * 1e9)
        return [self._active]

    def _makes_progress(self, observation: Observation) -> bool:
        """Return whether any rank makes progress.

        In a healthy job, one of the first checked does.
        """
        fresh_since_ns = self._fresh_since_ns(observation)
        return any(
            live.state is not None
            and live.surely_frozen_seconds == 0
            and live.received_ns >= fresh_since_ns
            and live.state.view.status != "finished"
            and rank not in observation.exited
            for rank, live in observation.ranks.items()
        )

    def _fresh_since_ns(self, observation: Observation) -> int:
        return observation.now_ns - int(self.settings.freshness_seconds * 1e9)

    def _expected_ranks(self, observation: Observation) -> _ExpectedRanks | None:
        """Return the ranks that should make progress; None if a hang cannot be judged.

        A failed rank is reported by another detector and explains why the others wait. A silent
        node may run ranks that make progress.
        """
        if any(event.exit_code != 0 for event in observation.exited.values()):
            return None
        fresh_since_ns = self._fresh_since_ns(observation)
        live, without_page = [], set()
        for rank in range(self.generation.topology.world_size):
            if rank in observation.exited:
                continue
            newest = observation.ranks.get(rank)
            if has_finished(newest):
                continue
            if newest is not None and newest.received_ns >= fresh_since_ns:
                live.append(newest)
            elif (
                observation.last_seen_ns.get(self.generation.nodes.get(rank, ""), 0)
                >= fresh_since_ns
            ):
                without_page.add(rank)
            else:
                return None
        if len(without_page) >= len(live):
            return None
        return _ExpectedRanks(live, frozenset(without_page))

    # --- who ------------------------------------------------------------------------------

    def _stopped_processes(
        self, ranks: _ExpectedRanks, observation: Observation
    ) -> HangVerdict | None:
        """Return the verdict if processes are stopped or gone and all other ranks wait."""
        limit = self.settings.confirmed_seconds
        stopped = [
            live
            for live in ranks.live
            if live.state
            and live.state.process_state in STOPPED_STATES + GONE_STATES
            and live.apparently_frozen_seconds
            >= (self.settings.gone_seconds if _is_gone(live) else limit)
        ]
        if not stopped or not all(
            live.surely_frozen_seconds > 0 and live.apparently_frozen_seconds >= limit / 2
            for live in ranks.live
        ):
            return None
        return stopped_verdict(stopped, ranks.views, observation)

    def _late_ranks(self, ranks: _ExpectedRanks, observation: Observation) -> LateStart | None:
        """Return the ranks without which the job has not started for too long."""
        if observation.steps_finished:
            return None
        unseen = ranks.without_page - observation.ranks.keys()
        found = late_start(ranks.live, unseen, observation.groups)
        if found is None:
            return None
        limit = self.policy.late_rank_seconds
        if not found.late:
            limit *= self.settings.joining_multiple
        return found if found.seconds >= min(limit, self.policy.start_timeout_seconds) else None

    def _blocked_ranks(self, ranks: _ExpectedRanks, observation: Observation) -> HangVerdict | None:
        """Return the verdict if every rank has been in the same operation for too long."""
        observed = self.settings.observed_seconds
        if not observation.steps_finished and not any(map(_has_recorded, ranks.live)):
            return None  # the script may be training without calling the hooks
        if not all(live.surely_frozen_seconds >= observed for live in ranks.live):
            self._cache = _Cache()
            return None
        frozen = ranks.frozen_seconds
        phase_limit = self._phase_limit_seconds(ranks, observation)
        if frozen < max(self.policy.hang_after_seconds, phase_limit):
            return None
        culprits = self._culprits(ranks, observation)
        if frozen < self._operation_limit_seconds(ranks, culprits, observation):
            return None
        live_by_rank = {live.rank: live for live in ranks.live}
        verdict = verdict_on(
            culprits, live_by_rank, ranks.without_page, observation, self.generation
        )
        limit = self.settings.pause_multiple * self._pauses.get(verdict.ranks, 0.0)
        if frozen < limit:
            return None
        limit = self._pause_limit_seconds(verdict.ranks, ranks, observation)
        self._limit = limit if frozen < limit else None
        return verdict

    def _culprits(self, ranks: _ExpectedRanks, observation: Observation) -> Culprits | None:
        cache = self._cache
        if cache.without_page != ranks.without_page:
            views = ranks.views
            async_ranks = frozenset(
                rank for rank in views if self.generation.gpus.get(rank) is not None
            )
            cache.culprits = find_culprits(
                views,
                observation.groups,
                lambda rank: self._program(rank, observation),
                async_ranks,
            )
            cache.without_page = ranks.without_page
        return cache.culprits

    def _program(self, rank: int, observation: Observation) -> RankProgram | None:
        programs = self._cache.programs
        if rank not in programs:
            spans = [] if observation.records is None else observation.records.of(rank)
            programs[rank] = program_of(rank, spans, observation.groups)
        return programs[rank]

    # --- when -----------------------------------------------------------------------------

    def _phase_limit_seconds(self, ranks: _ExpectedRanks, observation: Observation) -> float:
        """Return how long the phase may take without progress, independent of the culprit."""
        settings, policy, statuses = self.settings, self.policy, ranks.statuses
        if "checkpointing" in statuses or statuses == {"stopping"}:
            return policy.hang_checkpoint_seconds
        if "failed" in statuses:  # its exit explains why the others wait
            return settings.ending_seconds
        # Others may be blocked and have the signal, too. Without it they wait for good.
        if "stopping" in statuses:
            return settings.signaled_seconds
        if any(map(_is_gone, ranks.live)):
            return settings.gone_seconds
        never_seen = any(rank not in observation.ranks for rank in ranks.without_page)
        if (
            statuses & {"starting", "loading", "joining"}
            or never_seen
            or observation.steps_finished < settings.known_steps
        ):
            return policy.start_timeout_seconds
        return policy.hang_evaluation_seconds if "evaluating" in statuses else 0.0

    def _operation_limit_seconds(
        self, ranks: _ExpectedRanks, culprits: Culprits | None, observation: Observation
    ) -> float:
        """Return how long the culprits may be in their operation.

        If no rank waits for another, all may be in the same long operation.
        """
        settings, policy = self.settings, self.policy
        step_limit = settings.step_multiple * (observation.step_seconds_p99 or 0.0)
        if culprits is None and len(ranks.live) > 1:
            return max(step_limit, settings.pause_seconds)
        blamed = _blamed(culprits, ranks)
        usual = [self._usual_seconds(live, observation) for live in blamed[:_MAX_RANKS_TIMED]]
        measured = [seconds for seconds in usual if seconds is not None]
        limit = policy.hang_after_seconds
        if not measured or len(measured) < len(usual):
            limit = max(limit, step_limit)
        else:
            stall = settings.least_steps * (observation.step_seconds or 0.0)
            usual_limit = settings.step_multiple * max(measured)
            limit = max(limit, usual_limit, min(stall, settings.least_steps_seconds))
        if any(map(_waits_for_data, blamed)):
            limit = max(limit, step_limit)  # a slow read is as long as a step, and no hang
        longer = self._longer_on_busy_host(culprits, ranks, observation)
        return limit * max(longer, 2.0 if any(map(_lacks_cpu, blamed)) else 1.0)

    def _longer_on_busy_host(
        self, culprits: Culprits | None, ranks: _ExpectedRanks, observation: Observation
    ) -> float:
        """Return how many times as long an operation may take because its threads wait for CPUs.

        A transfer that all of its ranks have begun waits for threads at both of its ends.
        """
        frozen_since_ns = observation.now_ns - int(ranks.frozen_seconds * 1e9)
        rank_waits = usual_wait_share(observation, self.generation, frozen_since_ns) or 0.0
        numbers = [live.rank for live in ranks.live]
        node_waits = OF_PRESSURE * pressure_share(observation, self.generation, numbers)
        share = min(max(rank_waits, node_waits), self.settings.most_waiting_share)
        is_transfer = culprits is not None and culprits.side == "device"
        return (1.0 / (1.0 - share)) ** (2 if is_transfer else 1)

    def _pause_limit_seconds(
        self, blamed: Collection[int], ranks: _ExpectedRanks, observation: Observation
    ) -> float:
        """Return for how long the culprits may run code of the script that records nothing.

        They may evaluate, prepare data or upload a file there. 0: their operation is recorded.
        """
        culprits = self._culprits(ranks, observation)
        steps = 2.0 * self.settings.step_multiple * (observation.step_seconds_p99 or 0.0)
        busy_limit = max(self.policy.hang_busy_seconds, steps)
        if culprits is None:
            return busy_limit
        live = [one for one in ranks.live if one.rank in blamed]
        if culprits.side != "host" or culprits.cycle or len(live) < len(blamed):
            return 0.0
        if "evaluating" in ranks.statuses or all(map(_uses_cpu, live)):
            return busy_limit
        return self.policy.hang_evaluation_seconds if all(map(_is_in_script, live)) else 0.0

    def _usual_seconds(self, live: LiveRank, observation: Observation) -> float | None:
        """Return the p99 duration of the operation that the rank is in."""
        if live.state is None or observation.records is None:
            return None
        op, usual = innermost_op(live.state.view), self._cache.usual_seconds
        if (live.rank, op) not in usual:
            usual[live.rank, op] = p99_seconds(observation.records.of(live.rank), op)
        return usual[live.rank, op]

    # --- reports --------------------------------------------------------------------------

    def _hang(
        self, verdict: HangVerdict, ranks: _ExpectedRanks, observation: Observation
    ) -> Finding:
        late = self._late
        frozen = ranks.frozen_seconds if late is None else late.seconds
        steps = [live.state.view.step for live in ranks.live if live.state and late is None]
        rank = verdict.ranks[0] if verdict.is_single else None
        node = self._node_diagnosis(verdict, frozen, min(steps, default=None), observation)
        return self.finding(
            "hang",
            cause=verdict.cause,
            summary=self._summary(rank, verdict.cause, observation),
            now_ns=observation.now_ns,
            rank=rank,
            ranks=list(verdict.ranks),
            link=verdict.link,
            side=verdict.side,
            onset_step=min(steps, default=None),
            step=max(steps, default=None),
            severity=self._severity(),
            cost_ratio=1.0,
            can_checkpoint=False,
            causes=node.causes if node.cause != UNKNOWN else [],
            advice=node.advice if self._limit is None else PAUSE_ADVICE,
            evidence=[_duration(frozen), *verdict.evidence, *node.evidence],
            counter_evidence=[*verdict.counter_evidence, *_normal_on_node(node)],
            stacks_wanted=list(verdict.stacks_wanted),
            dumps_wanted=late is None and self._limit is None and self._can_read_dumps,
        )

    def _is_overdue(self, late: LateStart) -> bool:
        """Return whether a start has taken longer than any may take."""
        return late.seconds >= self.policy.start_timeout_seconds

    def _severity(self) -> Severity:
        if self._limit is not None:
            return "info"
        return "critical" if self._late is None or self._is_overdue(self._late) else "warning"

    def _escalate_pause(self, ranks: _ExpectedRanks, observation: Observation) -> list[Finding]:
        """Report ranks as hung that might have worked: it takes too long, or they cannot."""
        active, before = self._active, self._limit
        if active is None or before is None:
            return []
        stopped = self._stopped_processes(ranks, observation)
        if stopped is not None:
            self._limit = self._frame = None
            return self._report(stopped, ranks, observation)
        self._limit = max(before, self._pause_limit_seconds(active.ranks, ranks, observation))
        if ranks.frozen_seconds >= self._limit:
            active = self._as_hang(active, observation)
        elif self._limit == before:
            return []
        self._active = msgspec.structs.replace(
            active,
            summary=self._summary(active.rank, active.cause, observation, self._frame),
            detected_ns=observation.now_ns,
            evidence=[_duration(ranks.frozen_seconds), *active.evidence[1:]],
        )
        return [self._active]

    def _escalate_after_timeout(self, observation: Observation) -> list[Finding]:
        """Report a rank as hung that kept the others waiting until their collective timed out."""
        active = self._active
        if active is None or active.rank is None or self._limit is None:
            return []
        exited = observation.exited.items()
        waited = sorted(rank for rank, event in exited if names_timeout(event.log_tail))
        if not waited or active.rank in waited:
            return []
        active = self._as_hang(active, observation)
        self._active = msgspec.structs.replace(
            active,
            summary=self._summary(active.rank, active.cause, observation, self._frame),
            detected_ns=observation.now_ns,
            dumps_wanted=False,  # the ranks that would write them have ended
            evidence=[
                *active.evidence,
                Evidence(f"{ranks_text(waited)} ended because a collective timed out"),
            ],
        )
        return [self._active]

    def _as_hang(self, active: Finding, observation: Observation) -> Finding:
        """Return the active information as a hang, for which dumps are read."""
        self._limit = None
        self._detected_ns = observation.now_ns
        return msgspec.structs.replace(
            active, severity="critical", advice=None, dumps_wanted=self._can_read_dumps
        )

    @property
    def _can_read_dumps(self) -> bool:
        return self.generation.topology.world_size <= MAX_RANKS_FOR_DUMPS

    def _escalate_late_start(
        self, ranks: _ExpectedRanks, observation: Observation
    ) -> list[Finding]:
        """Report a start as hung that has waited for a rank for as long as a start may take."""
        active = self._active
        assert active is not None
        if self._late is None or active.severity == "critical":
            return []
        unseen = ranks.without_page - observation.ranks.keys()
        found = late_start(ranks.live, unseen, observation.groups)
        if found is None or not self._is_overdue(found):
            return []
        self._late = found
        self._active = msgspec.structs.replace(
            active,
            severity="critical",
            summary=self._summary(active.rank, active.cause, observation, self._frame),
            detected_ns=observation.now_ns,
        )
        return [self._active]

    def _node_diagnosis(
        self, verdict: HangVerdict, frozen: float, step: int | None, observation: Observation
    ) -> Diagnosis:
        """Return what the culprit's node measured. It adds evidence and changes no verdict."""
        rank = verdict.ranks[0] if verdict.ranks else None
        if rank is None:
            return Diagnosis()
        onset_ns = observation.now_ns - int(frozen * 1e9)
        return diagnose(rank, onset_ns, step, observation, self.generation, kind="hang")

    def _summary(
        self,
        rank: int | None,
        cause: str,
        observation: Observation,
        frame: StackFrame | None = None,
        awaited: str | None = None,
    ) -> str:
        if self._late is not None:
            return late_summary(self._late, self.generation, frame)
        subject = self.generation.subject(rank)
        if self._limit is not None:
            return pause_summary(subject, cause, frame, self._limit, is_rank=rank is not None)
        live = None if rank is None else observation.ranks.get(rank)
        state = None if live is None else live.state
        return hang_summary(
            subject,
            cause,
            frame,
            awaited,
            is_rank=rank is not None,
            was_signaled=state is not None and state.view.status == "stopping",
        )

    def _add_stacks(self, observation: Observation) -> list[Finding]:
        """Report the stacks that have arrived since the last report."""
        active = self._active
        assert active is not None
        reported = {stacks.rank for stacks in active.stacks}
        new = [
            observation.stacks[rank]
            for rank in active.stacks_wanted
            if rank not in reported
            and rank in observation.stacks
            and observation.stacks[rank] is not self._earlier_stacks.get(rank)
        ]
        if not new:
            return []
        all_stacks = [*active.stacks, *new]
        active = self._active = self._with_group_creation(active, all_stacks, observation)
        cause, frame, awaited = active.cause, None, None
        culprit = next((stacks for stacks in all_stacks if stacks.rank == active.rank), None)
        # A communication that does not end on the devices is in no rank's own code.
        if culprit is not None and (active.side != "device" or side_of(cause) == "device"):
            cause = cause_with_stacks(culprit, cause)
            frame = user_frame(culprit, cause)
            awaited = awaited_worker(culprit)
        elif active.rank is None and active.side == "host":
            stuck = [stacks for stacks in all_stacks if stacks.rank in active.ranks]
            places = {user_frame(stacks, cause) for stacks in stuck}
            wanted = set(active.stacks_wanted).intersection(active.ranks)
            frame = places.pop() if len(places) == 1 and len(stuck) == len(wanted) else None
        self._frame = frame
        new_evidence = [line for stacks in new for line in stack_evidence(stacks)]
        if active.side == "mismatch" and self._limit is not None:
            active = self._as_hang(active, observation)  # ranks wait for one that will not come
        self._active = msgspec.structs.replace(
            active,
            cause=cause,
            side=active.side if cause == active.cause else side_of(cause),
            summary=self._summary(active.rank, cause, observation, frame, awaited),
            detected_ns=observation.now_ns,
            stacks=all_stacks,
            evidence=[*active.evidence, *new_evidence],
        )
        return [self._active]

    def _with_group_creation(
        self, active: Finding, stacks: Sequence[RankStackTraces], observation: Observation
    ) -> Finding:
        """Return the finding, with the ranks that wait for others in `new_group` as the reason.

        All ranks must call it. No operation is recorded there, and ranks that are not in the new
        group may return at once: which of several others left it out is not known. If no rank is
        known to wait for those in it, the stacks of all tell them apart.
        """
        known = {one.rank: creates_group(one) for one in stacks if one.threads}
        if active.side != "host" or not any(known.values()):
            return active
        running = observation.ranks.keys() - observation.exited.keys()
        inside = active.ranks
        if not running - {*inside} or not all(known.get(rank, True) for rank in inside):
            if running - known.keys():
                wanted = dict.fromkeys([*active.stacks_wanted, *sorted(running)])
                return msgspec.structs.replace(active, stacks_wanted=list(wanted)[:_MAX_STACKS])
            inside = sorted(rank for rank, creates in known.items() if creates)
        outside = sorted(running - {*inside})
        is_known = any(known.get(rank) for rank in inside)
        if not is_known or all(known.get(rank, True) for rank in outside):
            return active
        verb = "waits" if len(inside) == 1 else "wait"
        reason = f"new_group, which {ranks_text(outside)} left or did not call"
        if len(outside) == 1:
            reason = f"{ranks_text(inside)} {verb} in new_group, which it did not call"
            rank = outside[0]
            node, stage = self.generation.node(rank), self.generation.stage(rank)
            active = msgspec.structs.replace(
                active, rank=rank, ranks=outside, node=node, stage=stage, causes=[], advice=None
            )
        text = f"{ranks_text(inside)} {verb} in new_group, which all ranks must call"
        return msgspec.structs.replace(
            active,
            cause=f"{MISMATCH}: {reason}",
            side="mismatch",
            evidence=[Evidence(text), *active.evidence],
        )

    def _add_dumps(self, ranks: _ExpectedRanks, observation: Observation) -> list[Finding]:
        """Report what the Flight Recorder dumps show, once all arrived or the timeout is over."""
        active = self._active
        assert active is not None
        if active.dumps_reported or not active.dumps_wanted:
            return []
        new = {
            rank: dump
            for rank, dump in observation.dumps.items()
            if dump is not self._earlier_dumps.get(rank)
        }
        expected = {live.rank for live in ranks.live} | ranks.without_page
        is_timeout = observation.now_ns - self._detected_ns >= DUMP_TIMEOUT_NS
        if not new or (expected - new.keys() and not is_timeout):
            return []
        # Only now, because a dump of a hostile script takes long to read.
        report, text = conclude({rank: read(dump) for rank, dump in new.items()}, expected)
        agrees = report is None or not report.culprits or set(report.culprits) & set(active.ranks)
        line = [Evidence(text)]
        self._active = msgspec.structs.replace(
            active,
            detected_ns=observation.now_ns,
            dumps_reported=True,
            evidence=active.evidence + (line if agrees else []),
            counter_evidence=active.counter_evidence + ([] if agrees else line),
        )
        return [self._active]

    def _clear_on_progress(self, ranks: _ExpectedRanks, observation: Observation) -> list[Finding]:
        """Clear the finding if a rank made progress: it was not a hang, or it is over.

        A rank that fails while it waits, as after a timeout of its collective, makes none.
        """
        active = self._active
        assert active is not None
        if self._ending_seconds(active, ranks, observation) is None and all(
            live.surely_frozen_seconds > 0 or live.status == "failed" for live in ranks.live
        ):
            return []
        # The script may pause by design, again and again.
        culprits, seconds = tuple(active.ranks), (observation.now_ns - self._frozen_since_ns) / 1e9
        if self._late is None:
            self._pauses[culprits] = max(self._pauses.get(culprits, 0.0), seconds)
        return self._clear(active, RESUMED, observation)

    def _ending_seconds(
        self, active: Finding, ranks: _ExpectedRanks, observation: Observation
    ) -> float | None:
        """Return how long ago a culprit left its loop by an error, such as Ctrl-C; None if none
        has since the report. How its process ends is known soon."""
        reported_seconds = (observation.now_ns - self._detected_ns) / 1e9
        ending = [
            live.surely_frozen_seconds
            for live in ranks.live
            if live.status == "failed"
            and live.rank in active.ranks
            and live.surely_frozen_seconds < reported_seconds
        ]
        return max(ending, default=None)

    def _clear_on_error(self, observation: Observation) -> list[Finding]:
        """Clear the finding if an error of a culprit's own has ended it, which is reported then."""
        active = self._active
        if active is None or not any(_raised_by_itself(rank, observation) for rank in active.ranks):
            return []
        return self._clear(active, ENDED_BY_ERROR, observation)

    def _clear(self, active: Finding, why: str, observation: Observation) -> list[Finding]:
        self._active = self._late = self._frame = None
        return [cleared(active, why, observation.now_ns)]


def _raised_by_itself(rank: int, observation: Observation) -> bool:
    """Return whether a rank ended with an error, and not because a person stopped the job."""
    event, live = observation.exited.get(rank), observation.ranks.get(rank)
    if event is None or not event.exit_code or live is None or live.status != "failed":
        return False
    is_requested = event.commanded or event.drained or event.launcher_signal is not None
    return not is_requested and not is_interrupt(event)


def _duration(seconds: float) -> Evidence:
    return Evidence(f"no rank has made progress for {seconds:.1f} s", "frozen_seconds", seconds)


def _normal_on_node(node: Diagnosis) -> list[Evidence]:
    """Return one line that lists what is normal on the node, and one that lists what was not
    measured."""
    if node.cause != UNKNOWN or not node.counter_evidence:
        return []
    lines = []
    if node.ruled_out:
        lines.append(Evidence(f"its node shows no problem with: {', '.join(node.ruled_out)}"))
    last = node.counter_evidence[-1]
    if last.text.startswith("not measured: "):
        lines.append(last)
    return lines


def _blamed(culprits: Culprits | None, ranks: _ExpectedRanks) -> list[LiveRank]:
    if culprits is None:
        return ranks.live
    blamed: Collection[int] = (
        culprits.ranks or culprits.cycle or {operation.rank for operation in culprits.operations}
    )
    return [live for live in ranks.live if live.rank in blamed]


def _is_in_script(live: LiveRank) -> bool:
    """Return whether the rank is in no operation, or in a section that the script has named."""
    op = None if live.state is None else innermost_op(live.state.view)
    return op is not None and (op == Op.STEP or op >= SECTION_BASE)


def _uses_cpu(live: LiveRank) -> bool:
    return (live.cpu_share_while_frozen or 0.0) >= BUSY_CPU_SHARE or _lacks_cpu(live)


def _lacks_cpu(live: LiveRank) -> bool:
    """Return whether the process is runnable but gets no CPU: its node is busy."""
    share = live.cpu_share_while_frozen
    state = live.state.process_state if live.state else None
    return state == "R" and share is not None and share < BUSY_CPU_SHARE


def _waits_for_data(live: LiveRank) -> bool:
    return live.state is not None and innermost_op(live.state.view) == Op.DATA_WAIT


def _is_gone(live: LiveRank) -> bool:
    return live.state is not None and live.state.process_state in GONE_STATES


def _has_recorded(live: LiveRank) -> bool:
    """Return whether the rank has recorded a step, a section or a collective."""
    if live.state is None:
        return False
    view = live.state.view
    return view.status not in ("starting", "loading") or bool(
        view.head or view.frames or view.groups
    )
