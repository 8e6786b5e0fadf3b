"""Flags ranks that wait for their data while their peers do not, or all ranks if all of them wait.

A slow disk, a starved loader process or a cold cache appears as DATA_WAIT of the ranks of one node,
not as slow compute; all other ranks then wait for them. Peers share a stage: often only the first
and the last stage read anything. A rank is also compared with its own past, so that neither a stage
that loads more than others nor storage that is slow for all is blamed on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import (
    OF_PRESSURE,
    largest_accident,
    pressure_share,
    wait_share_since,
)
from paceline_server.detect.kinds import SLOW_DATA, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import (
    STEPS_BETWEEN_UPDATES,
    MeasuredCost,
    cost_of,
    cost_text,
    gain,
    speedup_with_data_in_time,
)
from paceline_server.detect.shared_settings import LEAST_SECONDS
from paceline_server.detect.slow_data.settings import DEFAULTS, SlowDataSettings
from paceline_server.detect.slow_line import LineSearch, SlowLine
from paceline_server.medians import column_medians, median
from paceline_server.policy import Policy
from paceline_server.steps.grid import grid_of
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CAUSE = "slow data loading"
ALL = -1  # in lists of ranks: stands for all ranks
PAST_STEPS = 32
STEPS_BETWEEN_MEDIANS = 4
EACH_STEP = 0.8  # share of slow steps from which they are all steps but for accidents
CHANCE_SIGMAS = 4.0  # standard deviations of a Poisson count


@dataclass(slots=True)
class _LateData:
    ranks: list[int]
    onset_step: int
    onset_ns: int
    least_seconds: float
    finding: Finding | None = None  # None: it has not lasted long enough to be reported
    cost: MeasuredCost = field(default_factory=MeasuredCost)
    quiet_steps: int = 0
    search: LineSearch = field(default_factory=lambda: LineSearch(of_workers=True))

    @property
    def is_uncertain(self) -> bool:
        """Return whether it comes and goes, and is not reported yet: a steady wait replaces it."""
        return self.finding is None and self.least_seconds > LEAST_SECONDS


@dataclass(frozen=True, slots=True)
class _Wait:
    """How long ranks wait for their data since the onset."""

    seconds: float  # median of the slow steps
    normal_seconds: float
    share: float  # part of the step time
    cost: float  # part of the job's step time
    slow_steps: int
    steps: int
    is_steady: bool  # most steps are slow

    def evidence(self, whom: str) -> list[Evidence]:
        """Return the measurements; `whom` has the normal wait."""
        return [
            Evidence(
                f"data wait {self.seconds * 1e3:.0f} ms; {self.normal_seconds * 1e3:.0f} ms {whom}",
                "data_wait_seconds",
                self.seconds,
                self.normal_seconds,
            ),
            Evidence(
                f"slow in {self.slow_steps} of the last {self.steps} steps",
                "slow_steps",
                float(self.slow_steps),
                0.0,
            ),
        ]


class SlowDataDetector(Detector):
    """Finding kind `slow_data`, fingerprint `slow_data:RANK`, or `slow_data` for all ranks."""

    kinds: ClassVar[tuple[Kind, ...]] = (SLOW_DATA,)
    order: ClassVar[int] = 11

    def __init__(
        self, generation: Generation, policy: Policy, settings: SlowDataSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        world = generation.topology.world_size
        self._stage = grid_of(generation.topology).stage
        # Sets of ranks that share only their storage.
        self._unrelated = _unrelated(generation)
        # One extra column represents all ranks: it holds a wait that most of them exceed.
        self._past = _Past(world + 1)
        self._excess = np.zeros((max(settings.recurring_windows), world + 1))
        self._waits = np.zeros_like(self._excess)
        self._normal = np.zeros_like(self._excess)
        self._steps: list[int] = []
        self._started_ns: list[int] = []
        self._step_seconds: list[float] = []
        self._ended_ns = 0  # end of the newest step
        self._active: dict[str, _LateData] = {}

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            self._measure(timing)
            findings += self._judge(observation)
        return findings

    def _measure(self, timing: StepTiming) -> None:
        """Append the wait in excess of the normal one, as a share of the step; 0 where unknown."""
        ranks = timing.ranks
        waits = np.full(self._stage.size + 1, np.nan)
        waits[ranks.rank] = ranks.data_wait_seconds
        waits[-1] = self._wait_of_most(waits)
        peers, past = self._peers(waits[:-1]), self._past.medians
        normal = np.append(peers, np.nan)
        # Data that is late from the first steps on has no past, but for a step in which all waited.
        is_known = self._past.counts >= self.settings.baseline_steps
        normal[is_known] = np.fmax(normal, past)[is_known]
        step_seconds = max(median(ranks.step_seconds), 1e-9) if ranks.rank.size else 1.0
        excess = (waits - normal) / step_seconds
        reported = np.zeros(waits.size, dtype=np.bool_)
        for active in self._active.values():
            if active.finding is not None:
                reported[active.ranks] = True
        ratio = np.where(reported, self.settings.lasting_ratio, self.settings.ratio)
        slow = (excess >= self.settings.share) & (waits >= ratio * normal)
        # When all ranks wait, no other rank is slow.
        slow[:-1] &= reported[:-1] | ~slow[-1]
        self._past.add(np.where(slow, np.nan, waits))
        excess = np.where(slow, excess, 0.0)
        for rows, row in ((self._excess, excess), (self._waits, waits), (self._normal, normal)):
            rows[:-1] = rows[1:]
            rows[-1] = row
        self._steps.append(timing.step)
        self._started_ns.append(int(ranks.start_ns.min(initial=np.iinfo(np.int64).max)))
        self._ended_ns = self._started_ns[-1] + int(step_seconds * 1e9)
        self._step_seconds.append(step_seconds)
        for history in (self._steps, self._started_ns, self._step_seconds):
            del history[: -len(self._excess)]

    def _wait_of_most(self, waits: Floats) -> float:
        """Return the wait that three quarters of a set of unrelated ranks reach.

        NaN without such ranks.
        """
        least = np.nan
        for ranks in self._unrelated:
            known = np.sort(waits[ranks][~np.isnan(waits[ranks])])
            if known.size > 1:
                least = np.fmax(least, known[known.size // 4])
        return float(least)

    def _peers(self, waits: Floats) -> Floats:
        """Return the median of the other ranks of the same stage; NaN if there are none."""
        normal = np.full(waits.size, np.nan)
        for stage in range(self.generation.topology.pp):
            known = np.flatnonzero((self._stage == stage) & ~np.isnan(waits))
            normal[known] = medians_of_others(waits[known])
        return normal

    def _judge(self, observation: Observation) -> list[Finding]:
        settings = self.settings
        slow = self._excess > 0
        recent = slow[-settings.window_steps :].sum(axis=0) >= settings.hits
        recurring = self._recurring_steps(slow)
        findings = self._follow(slow[-1], observation)
        suspects = np.flatnonzero((recent | (recurring > 0)) & slow[-1]).tolist()
        if self._excess.shape[1] - 1 in suspects:
            suspects = [ALL]
        for node, ranks in self._by_node(suspects).items():
            fingerprint = "slow_data" if ranks == [ALL] else f"slow_data:{ranks[0]}"
            known = [
                key
                for key, active in self._active.items()
                if set(ranks) & set(active.ranks) or self._node(active.ranks) == node
            ]
            is_steady = bool(recent[ranks[0]])
            if not all(is_steady and self._active[key].is_uncertain for key in known):
                continue
            for key in known:
                del self._active[key]
            steps = settings.window_steps if is_steady else int(recurring[ranks[0]])
            first = self._first_slow(ranks, steps)
            self._active[fingerprint] = _LateData(
                ranks,
                self._steps[first],
                self._started_ns[first],
                LEAST_SECONDS if is_steady else settings.recurring_seconds,
            )
        return [
            *findings,
            *self._changed_costs(observation),
            *self._report_lasting(observation),
            *self._with_lines(observation),
        ]

    def _with_lines(self, observation: Observation) -> list[Finding]:
        """Return the verdicts whose Python line is known by now."""
        findings = []
        for fingerprint, active in self._active.items():
            before = active.finding
            if before is None or before.cause != CAUSE:
                continue
            if active.search.finds(active.onset_ns, observation):
                active.finding = self._finding(fingerprint, active, observation)
                findings.append(active.finding)
        return findings

    def _changed_costs(self, observation: Observation) -> list[Finding]:
        """Return the reported findings that cost more or less than when they were reported."""
        findings: list[Finding] = []
        if self._steps[-1] % STEPS_BETWEEN_UPDATES:
            return findings
        for fingerprint, active in self._active.items():
            before = active.finding
            if before is None or not self._excess[-1, active.ranks[0]] > 0:
                continue
            now = self._finding(fingerprint, active, observation)
            if now.cause == before.cause and active.cost.is_notable(before, now.cost_ratio):
                active.finding = now
                findings.append(now)
        return findings

    def _report_lasting(self, observation: Observation) -> list[Finding]:
        """Return the findings on waits that have lasted long enough now."""
        now_ns, findings = self._ended_ns, []
        for fingerprint, active in self._active.items():
            seconds = observation.training_seconds(active.onset_ns, now_ns)
            if active.finding is not None or seconds < active.least_seconds:
                continue
            recent = max(
                float(self._typical_shares(steps, active.ranks[:1])[0])
                for steps in self.settings.recurring_windows
            )
            if active.is_uncertain and recent < self.settings.recurring_share:
                continue  # it has become rare since
            finding = self._finding(fingerprint, active, observation)
            # A loader that waits for a CPU by chance is late by no more than ranks wait for one, or
            # its workers, whose waits are not measured.
            waiting = list(self.generation.nodes) if active.ranks == [ALL] else active.ranks
            shares = [
                OF_PRESSURE * pressure_share(observation, self.generation, waiting),
                *(
                    wait_share_since(observation, self.generation, active.onset_ns, ranks) or 0.0
                    for ranks in (None, active.ranks)
                ),
            ]
            if (finding.slowdown or 1.0) >= largest_accident(max(shares), seconds):
                active.finding = finding
                findings.append(finding)
        return findings

    def _first_slow(self, ranks: list[int], steps: int) -> int:
        """Return the place of the first slow one among the newest `steps`."""
        slow = np.flatnonzero(self._excess[-steps:, ranks[0]] > 0)
        return max(len(self._steps) - steps + int(slow[0]), 0)

    def _node(self, ranks: list[int]) -> str | None:
        return None if ranks == [ALL] else self.generation.node(ranks[0])

    def _recurring_steps(self, slow: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Return the least number of newest steps in which each rank waited often; 0: in none."""
        found = np.zeros(slow.shape[1], dtype=np.intp)
        waiting = np.flatnonzero(slow[-1])
        for steps in sorted(self.settings.recurring_windows, reverse=True):
            hits = self._stalls_beyond_others(slow[-steps:])[waiting]
            share = self._typical_shares(steps, waiting)
            often = hits >= self.settings.recurring_hits
            if steps > self.settings.epoch_steps:
                often &= waiting < self._stage.size
            found[waiting[often & (share >= self.settings.recurring_share)]] = steps
        return found

    def _typical_shares(self, steps: int, columns: Sequence[int] | Ints) -> Floats:
        """Return, by column, the share of the time that its waits cost if each is a typical one.

        A single long wait among short ones is an accident: of storage, or of a busy host.
        """
        seconds = np.array(self._step_seconds[-steps:])
        excess = self._excess[-len(seconds) :, columns]
        late = excess > 0
        typical = column_medians(np.where(late, excess * seconds[:, None], np.nan))
        shares: Floats = np.nan_to_num(typical) * late.sum(axis=0) / seconds.sum()
        return shares

    def _stalls_beyond_others(self, slow: npt.NDArray[np.bool_]) -> Floats:
        """Return how many slow steps each rank has beyond what chance explains.

        A busy host stalls all of its ranks, and some by chance more often than others.
        """
        hits: Floats = slow.sum(axis=0).astype(np.float64)
        own = hits[:-1]
        if own.size > 2:
            # Leave out the worst of the other ranks, because it may itself be at fault.
            top = np.sort(own)[-2:]
            worst = np.where(own == top[1], top[0], top[1])
            usual = np.maximum((own.sum() - own - worst) / (own.size - 2), 0.0)
            hits[:-1] -= usual + CHANCE_SIGMAS * np.sqrt(usual)
        return hits

    def _by_node(self, suspects: list[int]) -> Mapping[str | None, list[int]]:
        """Group ranks by node, worst rank first: they share a disk and get one finding."""
        found: dict[str | None, list[int]] = {}
        for rank in suspects:
            node = None if rank == ALL else self.generation.node(rank) or f"rank {rank}"
            found.setdefault(node, []).append(rank)
        worst = self._excess.mean(axis=0)
        return {
            node: sorted(ranks, key=lambda rank: (-worst[rank], rank))
            for node, ranks in found.items()
        }

    def _follow(self, slow_now: npt.NDArray[np.bool_], observation: Observation) -> list[Finding]:
        findings = []
        for fingerprint, active in list(self._active.items()):
            ranks = active.ranks
            active.quiet_steps = 0 if slow_now[ranks].any() else active.quiet_steps + 1
            # An intermittent wait is not over between two stalls.
            late = np.flatnonzero(self._excess[:, ranks[0]] > 0)
            interval = int(late[-1] - late[0]) // (late.size - 1) if late.size > 1 else 0
            if active.quiet_steps >= max(self.settings.hits, 3 * interval):
                del self._active[fingerprint]
                self._excess[:, ranks] = 0.0
                if active.finding is None:
                    continue
                summary = f"{self._subject(active.finding.rank)} no longer waits for data."
                findings.append(
                    cleared(active.finding, summary, observation.now_ns, self._steps[-1])
                )
        return findings

    def _subject(self, rank: int | None) -> str:
        return "Every rank" if rank is None else self.generation.subject(rank)

    def _only_node(self) -> str | None:
        """Return the node that holds all ranks; None if there are several."""
        nodes = set(self.generation.nodes.values())
        return nodes.pop() if len(nodes) == 1 else None

    def _measured(self, active: _LateData, observation: Observation) -> _Wait:
        """Return how long the ranks have waited since the onset; measures its cost."""
        ranks, onset = active.ranks, active.onset_step
        steps = sum(step >= onset for step in self._steps)
        excess, waits = self._excess[-steps:, ranks[0]], self._waits[-steps:, ranks[0]]
        slow = np.flatnonzero(excess > 0)
        waited = median(waits[slow])
        is_steady = 2 * slow.size > len(excess)
        # If only some steps are slow: whole periods, each from one slow step to the next.
        since, until = slow[0], len(excess) if is_steady or slow.size == 1 else slow[-1]
        step_seconds = np.array(self._step_seconds)[-steps:][since:until]
        normal = median(self._normal[-steps:, ranks[0]][slow])
        # A single long wait among them, such as that of a new epoch, makes no other one longer.
        usual = _mean_without_longest(waits[slow]) if is_steady else waited
        late_seconds = max(usual - normal, 0.0) * int((excess[since:until] > 0).sum())
        share = late_seconds / float(step_seconds.sum())
        cost = min(share, 1.0)
        if is_steady:  # a replay is of too few steps for waits in some of them
            waiting = range(self._stage.size) if ranks == [ALL] else ranks
            in_time = dict.fromkeys(waiting, normal)
            # A rank that is late while another one is slow holds up the job for less than its wait.
            saved = speedup_with_data_in_time(observation.replay, in_time, cost, onset)
            cost = min(cost, cost_of(saved) or 0.0)
        cost = active.cost.add(cost, observation.now_ns)
        return _Wait(waited, normal, share, cost, int(slow.size), len(excess), is_steady)

    def _finding(self, fingerprint: str, active: _LateData, observation: Observation) -> Finding:
        wait = self._measured(active, observation)
        ranks, onset = active.ranks, active.onset_step
        rank = None if ranks == [ALL] else ranks[0]
        slowdown = gain(min(wait.share, 1.0))
        diagnosis = diagnose(
            rank,
            active.onset_ns,
            onset,
            observation,
            self.generation,
            kind="slow_data",
            slowdown=slowdown,
            node=self.generation.node(rank) if rank is not None else self._only_node(),
        )
        cause = CAUSE if diagnosis.cause == UNKNOWN else diagnosis.cause
        how_often = "in most steps" if wait.is_steady else "in some steps"
        if wait.slow_steps >= EACH_STEP * wait.steps:
            how_often = "per step"
        reason = "" if cause == CAUSE else f", because of {cause}"
        line = self._line(active, rank) if cause == CAUSE else None
        speedup = gain(wait.cost)
        return self.finding(
            fingerprint,
            cause=cause,
            summary=(
                f"{self._subject(rank)} has waited {wait.seconds * 1e3:.0f} ms {how_often} for its "
                f"data since step {onset}{reason}. It {cost_text(wait.cost, speedup)}."
                + ("" if line is None else f" {line.sentence_about(rank)}")
            ),
            now_ns=observation.now_ns,
            rank=rank,
            ranks=sorted(ranks) if len(ranks) > 1 else [],
            onset_step=onset,
            step=self._steps[-1],
            slowdown=slowdown,
            cost_ratio=wait.cost,
            speedup=speedup,
            persistence="persistent",
            causes=diagnosis.causes,
            advice=diagnosis.advice or _ADVICE,
            severity="critical" if wait.share >= 1 / 3 else "warning",
            # Its peers get the same kind of data in time, so this node's path to the data is slow.
            suspects_node=rank is not None,
            evidence=[
                *wait.evidence(whom="before" if rank is None else "for its peers and before"),
                *([] if line is None else [line.evidence]),
                *diagnosis.evidence,
            ],
            counter_evidence=diagnosis.counter_evidence,
            profiles_wanted=active.search.ranks,
        )

    def _line(self, active: _LateData, rank: int | None) -> SlowLine | None:
        """Return the Python line if it is known; begin to search for it."""
        if rank is None:  # all ranks
            active.search.begin_alone(self.generation.topology.stage_leaders[0])
        else:
            affected = {one for other in self._active.values() for one in other.ranks}
            active.search.begin(rank, affected, self.generation)
        return active.search.line


def _unrelated(generation: Generation) -> list[Ints]:
    """Return the ranks of each stage that spans several nodes; otherwise all ranks."""
    ranks = grid_of(generation.topology).ranks
    stages = [np.sort(stage.ravel()) for stage in ranks]
    on_several = [
        stage for stage in stages if len({generation.node(rank) for rank in stage.tolist()}) > 1
    ]
    return on_several or [np.arange(ranks.size)]


def _mean_without_longest(waits: Floats) -> float:
    return float(np.sort(waits)[: max(waits.size - 1, 1)].mean())


_ADVICE = (
    "Read ahead: more loader workers or a longer prefetch hide reads that are sometimes slow. "
    "If a node is always slow, check its disk and its path to storage."
)


class _Past:
    """The waits of each rank in its last steps that were not slow."""

    def __init__(self, series: int) -> None:
        self._rows = np.full((PAST_STEPS, series), np.nan)
        self._added = 0
        self.medians = np.full(series, np.nan)
        self.counts = np.zeros(series, dtype=np.int64)

    def add(self, waits: Floats) -> None:
        row = self._rows[self._added % PAST_STEPS]
        # Slow steps do not replace normal ones: a stall that lasts would become normal.
        np.copyto(row, waits, where=~np.isnan(waits))
        self._added += 1
        if self._added < PAST_STEPS or not self._added % STEPS_BETWEEN_MEDIANS:
            rows = self._rows[: self._added]
            self.counts = (~np.isnan(rows)).sum(axis=0)
            ordered = np.sort(rows, axis=0)  # NaN last
            middle = np.maximum(self.counts - 1, 0) // 2
            self.medians = ordered[middle, np.arange(ordered.shape[1])]
