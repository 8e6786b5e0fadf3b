"""Flags a job that stands still, and names the rank it waits for.

Still means: every living rank's state page was seen unchanged for long enough, in recent reports.
Long enough is three times what the culprit's operation usually takes; short when a process is
found stopped or gone, which is no guess; and long while starting, evaluating or checkpointing.
The culprit comes from the wait-for graph over the state pages. Once told, Python stacks of the
culprit and of one that waits for it are asked for, and told when they come; so are all ranks'
Flight Recorder dumps, and what they say of the culprits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.hang.blame import Blame, blame
from paceline_server.detect.hang.program import RankProgram, program_of
from paceline_server.detect.hang.settings import DEFAULTS, HangSettings
from paceline_server.detect.hang.stuck import (
    BUSY_CPU_SHARE,
    GONE,
    STOPPED,
    python_cause,
    stack_evidence,
    telling_frame,
)
from paceline_server.detect.hang.verdict import HangCulprit, culprit_of, stopped_culprit
from paceline_server.detect.hang.waiting import innermost_op
from paceline_server.detect.kinds import HANG, Kind
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.recent import p99_seconds
from paceline_server.flight_recorder.received import Received, conclude
from paceline_server.policy import Policy
from paceline_wire.batch import RankStackTraces
from paceline_wire.ring import StateView

MOST_DUMPS = 512  # of ranks; reading each takes some milliseconds of the job's worker
DUMP_NS = 4_000_000_000  # PyTorch looks for the request once a second, and then writes
_RANKS_MEASURED = 8  # of a large group: what an operation usually takes is much the same for all


@dataclass(frozen=True, slots=True)
class _Standing:
    """The ranks that should be moving, and those that nothing is known of."""

    live: list[LiveRank]
    unseen: frozenset[int]  # no page of late, though their node speaks

    @property
    def statuses(self) -> set[str]:
        return {rank.state.view.status for rank in self.live if rank.state}


@dataclass(slots=True)
class _Known:
    """What was worked out while nothing moved: it need not be again."""

    unseen: frozenset[int] | None = None  # for which `found` holds; None: not worked out
    found: Blame | None = None
    usual: dict[tuple[int, int], float | None] = field(default_factory=dict)  # by rank and op
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
        self._known = _Known()
        self._stacks_before: dict[int, RankStackTraces] = {}  # taken for an earlier hang
        self._dumps_before: dict[int, Received] = {}
        self._found_ns = 0

    def update(self, seen: Observation) -> list[Finding]:
        if self._active is None and self._moves(seen):
            self._known = _Known()
            return []
        standing = self._standing(seen)
        if standing is None:
            return []
        if self._active is not None:
            return (
                self._clear_if_moving(standing, seen)
                or self._add_stacks(seen)
                or self._add_dumps(standing, seen)
            )
        culprit = self._stopped(standing, seen) or self._stuck(standing, seen)
        if culprit is None:
            return []
        self._active = self._finding(culprit, standing, seen)
        self._stacks_before = dict(seen.stacks)
        self._dumps_before = dict(seen.dumps)
        self._found_ns = seen.now_ns
        return [self._active]

    def _moves(self, seen: Observation) -> bool:
        """Whether a rank was seen to: while all is well, one of the first that are asked."""
        fresh_since_ns = self._fresh_since_ns(seen)
        return any(
            one.state is not None
            and one.surely_frozen_seconds == 0
            and one.received_ns >= fresh_since_ns
            and one.state.view.status != "finished"
            and rank not in seen.exited
            for rank, one in seen.ranks.items()
        )

    def _fresh_since_ns(self, seen: Observation) -> int:
        return seen.now_ns - int(self.settings.freshness_seconds * 1e9)

    def _standing(self, seen: Observation) -> _Standing | None:
        """None where stillness cannot be judged.

        A rank that failed is another detector's finding, and explains why the others stand. A
        node that is silent may hold ranks that move.
        """
        if any(event.exit_code != 0 for event in seen.exited.values()):
            return None
        fresh_since_ns = self._fresh_since_ns(seen)
        live, unseen = [], set()
        for rank in range(self.generation.topology.world_size):
            known = seen.ranks.get(rank)
            if rank in seen.exited:
                continue
            if known is not None and known.state and known.state.view.status == "finished":
                continue
            if known is not None and known.received_ns >= fresh_since_ns:
                live.append(known)
            elif seen.heard_ns.get(self.generation.nodes.get(rank, ""), 0) >= fresh_since_ns:
                unseen.add(rank)
            else:
                return None
        if len(unseen) >= len(live):
            return None
        return _Standing(live, frozenset(unseen))

    # --- who ------------------------------------------------------------------------------

    def _stopped(self, standing: _Standing, seen: Observation) -> HangCulprit | None:
        """Stopped or vanished processes that the whole job has come to wait for."""
        limit = self.settings.confirmed_seconds
        stopped = [
            rank
            for rank in standing.live
            if rank.state
            and rank.state.process_state in STOPPED + GONE
            and rank.apparently_frozen_seconds >= limit
        ]
        if not stopped or not all(
            other.surely_frozen_seconds > 0 and other.apparently_frozen_seconds >= limit / 2
            for other in standing.live
        ):
            return None
        return stopped_culprit(stopped, self._views(standing), seen)

    def _stuck(self, standing: _Standing, seen: Observation) -> HangCulprit | None:
        settings, policy = self.settings, self.policy
        sure = settings.observed_seconds
        if not all(rank.surely_frozen_seconds >= sure for rank in standing.live):
            self._known = _Known()
            return None
        frozen = min(rank.apparently_frozen_seconds for rank in standing.live)
        if frozen < max(policy.hang_after_seconds, self._patience_seconds(standing, seen)):
            return None
        found = self._blame(standing, seen)
        limit = self._limit_seconds(standing, found, seen)
        if frozen < limit:
            return None
        by_rank = {rank.rank: rank for rank in standing.live}
        return culprit_of(found, by_rank, standing.unseen, seen, self.generation)

    def _blame(self, standing: _Standing, seen: Observation) -> Blame | None:
        known = self._known
        if known.unseen != standing.unseen:
            views = self._views(standing)
            on_device = frozenset(r for r in views if self.generation.gpus.get(r) is not None)
            known.found = blame(
                views, seen.groups, lambda rank: self._program(rank, seen), on_device
            )
            known.unseen = standing.unseen
        return known.found

    def _views(self, standing: _Standing) -> dict[int, StateView]:
        return {rank.rank: rank.state.view for rank in standing.live if rank.state}

    def _program(self, rank: int, seen: Observation) -> RankProgram | None:
        programs = self._known.programs
        if rank not in programs:
            spans = [] if seen.records is None else seen.records.of(rank)
            programs[rank] = program_of(rank, spans, seen.groups)
        return programs[rank]

    # --- when -----------------------------------------------------------------------------

    def _patience_seconds(self, standing: _Standing, seen: Observation) -> float:
        """What may be silent for long, whoever holds it up."""
        settings, policy, statuses = self.settings, self.policy, standing.statuses
        if "checkpointing" in statuses:
            return policy.hang_checkpoint_seconds
        never_seen = any(rank not in seen.ranks for rank in standing.unseen)
        if "starting" in statuses or never_seen or seen.steps_finished < settings.known_steps:
            return policy.start_timeout_seconds
        return policy.hang_evaluation_seconds if "evaluating" in statuses else 0.0

    def _limit_seconds(self, standing: _Standing, found: Blame | None, seen: Observation) -> float:
        """By what those to blame are in; where nobody waits, all may be at the same long thing."""
        settings, policy = self.settings, self.policy
        step_seconds = settings.step_multiple * (seen.step_seconds_p99 or 0.0)
        if found is None and len(standing.live) > 1:
            return max(step_seconds, policy.hang_evaluation_seconds)
        concerned = _concerned(found, standing)
        usual = [self._usual_seconds(rank, seen) for rank in concerned[:_RANKS_MEASURED]]
        known = [seconds for seconds in usual if seconds is not None]
        if not known or len(known) < len(usual):
            return max(policy.hang_after_seconds, step_seconds)
        limit = max(policy.hang_after_seconds, settings.step_multiple * max(known))
        return 2 * limit if any(_starves(rank) for rank in concerned) else limit

    def _usual_seconds(self, rank: LiveRank, seen: Observation) -> float | None:
        """p99 of the operation that the rank is in."""
        if rank.state is None or seen.records is None:
            return None
        op, usual = innermost_op(rank.state.view), self._known.usual
        if (rank.rank, op) not in usual:
            usual[rank.rank, op] = p99_seconds(seen.records.of(rank.rank), op)
        return usual[rank.rank, op]

    # --- what is said ---------------------------------------------------------------------

    def _finding(self, culprit: HangCulprit, standing: _Standing, seen: Observation) -> Finding:
        frozen = min(rank.apparently_frozen_seconds for rank in standing.live)
        steps = [rank.state.view.step for rank in standing.live if rank.state]
        rank = culprit.ranks[0] if culprit.is_single else None
        evidence = Evidence(
            f"no rank has made progress for {frozen:.1f} s", "frozen_seconds", frozen
        )
        node = self._on_node(culprit, frozen, min(steps, default=None), seen)
        return self.finding(
            "hang",
            cause=culprit.cause,
            summary=self._summary(rank, culprit.cause),
            now_ns=seen.now_ns,
            rank=rank,
            ranks=list(culprit.ranks),
            link=culprit.link,
            side=culprit.side,
            onset_step=min(steps, default=None),
            step=max(steps, default=None),
            cost_ratio=1.0,
            can_checkpoint=False,
            causes=node.causes if node.cause != UNKNOWN else [],
            advice=node.advice,
            evidence=[evidence, *culprit.evidence, *node.evidence],
            counter_evidence=[*culprit.counter_evidence, *_normal(node)],
            stacks_wanted=list(culprit.stacks_wanted),
            dumps_wanted=self.generation.topology.world_size <= MOST_DUMPS,
        )

    def _on_node(
        self, culprit: HangCulprit, frozen: float, step: int | None, seen: Observation
    ) -> Diagnosis:
        """What the culprit's node shows of it. Who is to blame, and for what, stays as it is."""
        rank = culprit.ranks[0] if culprit.ranks else None
        if rank is None:
            return Diagnosis()
        onset_ns = seen.now_ns - int(frozen * 1e9)
        return diagnose(rank, onset_ns, step, seen, self.generation, kind="hang")

    def _summary(self, rank: int | None, cause: str, where: str = "") -> str:
        blamed = "" if rank is None else " and holds up the job"
        return f"{self.generation.subject(rank)} stands still{blamed}: {cause}{where}."

    def _add_stacks(self, seen: Observation) -> list[Finding]:
        """Tell of stacks that came since."""
        active = self._active
        assert active is not None
        told = {stacks.rank for stacks in active.stacks}
        new = [
            seen.stacks[rank]
            for rank in active.stacks_wanted
            if rank not in told
            and rank in seen.stacks
            and seen.stacks[rank] is not self._stacks_before.get(rank)
        ]
        if not new:
            return []
        cause, where = active.cause, ""
        stacks = [*active.stacks, *new]
        own = next((one for one in stacks if one.rank == active.rank), None)
        if own is not None and active.side == "host":
            cause = python_cause(own, cause)
            frame = telling_frame(own)
            where = "" if frame is None else f" ({frame})"
        self._active = msgspec.structs.replace(
            active,
            cause=cause,
            summary=self._summary(active.rank, cause, where),
            detected_ns=seen.now_ns,
            stacks=stacks,
            evidence=[*active.evidence, *(text for one in new for text in stack_evidence(one))],
        )
        return [self._active]

    def _add_dumps(self, standing: _Standing, seen: Observation) -> list[Finding]:
        """Tell what the Flight Recorder says, once all have answered or had time enough."""
        active = self._active
        assert active is not None
        if active.dumps_told or not active.dumps_wanted:
            return []
        new = {
            rank: dump
            for rank, dump in seen.dumps.items()
            if dump is not self._dumps_before.get(rank)
        }
        expected = {rank.rank for rank in standing.live} | standing.unseen
        if not new or (expected - new.keys() and seen.now_ns - self._found_ns < DUMP_NS):
            return []
        report, told = conclude(new, expected)
        evidence, against = [*active.evidence], [*active.counter_evidence]
        agrees = report is None or not report.culprits or set(report.culprits) & set(active.ranks)
        (evidence if agrees else against).append(Evidence(told))
        self._active = msgspec.structs.replace(
            active,
            detected_ns=seen.now_ns,
            dumps_told=True,
            evidence=evidence,
            counter_evidence=against,
        )
        return [self._active]

    def _clear_if_moving(self, standing: _Standing, seen: Observation) -> list[Finding]:
        """Someone moved after the finding: it was no hang, or it is over."""
        active = self._active
        assert active is not None
        if all(rank.surely_frozen_seconds > 0 for rank in standing.live):
            return []
        self._active = None
        summary = "The job makes progress again."
        return [cleared(active, summary, seen.now_ns)]


def _normal(node: Diagnosis) -> list[Evidence]:
    """In two lines: what is normal there, and what nobody measured."""
    if node.cause != UNKNOWN or not node.counter_evidence:
        return []
    told = [Evidence(f"its node shows no trouble of: {', '.join(node.ruled_out)}")]
    last = node.counter_evidence[-1]
    return told[: len(node.ruled_out)] + [last] * last.text.startswith("not measured: ")


def _concerned(found: Blame | None, standing: _Standing) -> list[LiveRank]:
    if found is None:
        return standing.live
    ranks: Collection[int] = found.ranks or found.circle or {wait.rank for wait in found.waits}
    return [rank for rank in standing.live if rank.rank in ranks]


def _starves(rank: LiveRank) -> bool:
    """It would run if it were let: its node is busy with something else."""
    share = rank.cpu_share_while_frozen
    state = rank.state.process_state if rank.state else None
    return state == "R" and share is not None and share < BUSY_CPU_SHARE
