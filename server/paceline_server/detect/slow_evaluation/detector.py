"""Detect a rank whose evaluations take longer than those of its peers, which then wait for it.

Compared is each rank's own time in an evaluation, without waits for other ranks. A rank that has
evaluated for longer since the first evaluation has more to evaluate: that is advice.

Evaluations may also differ by chance, such as rollouts of random length in reinforcement learning.
So the difference must exceed what the ranks differ by from one evaluation to the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import cpu_wait_share, largest_accident
from paceline_server.detect.kinds import SLOW_EVALUATION, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import because, gain
from paceline_server.detect.slow_evaluation.settings import DEFAULTS, SlowEvaluationSettings
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.timing import Floats, StepTiming

EVALUATIONS_STORED = 16


@dataclass(frozen=True, slots=True)
class _EvaluationTimes:
    step: int
    started_ns: int  # start of the step
    seconds: Floats  # by rank, without waits; NaN: it did not evaluate
    peers: Floats  # median of the other ranks
    since_seconds: float  # from the previous evaluation or the start until the end of this one


class SlowEvaluationDetector(Detector):
    """Finding kind `slow_evaluation`, fingerprint `slow_evaluation:RANK`."""

    kinds: ClassVar[tuple[Kind, ...]] = (SLOW_EVALUATION,)
    order: ClassVar[int] = 15

    def __init__(
        self, generation: Generation, policy: Policy, settings: SlowEvaluationSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._evaluations: deque[_EvaluationTimes] = deque(maxlen=EVALUATIONS_STORED)
        self._since_seconds = 0.0
        self._active: dict[int, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            if timing.ranks.rank.size and self._add(timing):
                findings += self._judge(observation)
        return findings

    def _add(self, timing: StepTiming) -> bool:
        """Add the evaluation of this step. Return whether most ranks took part in one."""
        ranks = timing.ranks
        self._since_seconds += median(ranks.step_seconds)
        known = ranks.evaluation_seconds > 0.0
        world = self.generation.topology.world_size
        if known.sum() < 2 or 2 * known.sum() <= world:
            return False
        seconds, peers = np.full((2, world), np.nan)
        seconds[ranks.rank[known]] = ranks.evaluation_seconds[known]
        peers[ranks.rank[known]] = medians_of_others(ranks.evaluation_seconds[known])
        started_ns = int(median(ranks.start_ns))
        self._evaluations.append(
            _EvaluationTimes(timing.step, started_ns, seconds, peers, self._since_seconds)
        )
        self._since_seconds = 0.0
        return True

    def _judge(self, observation: Observation) -> list[Finding]:
        """Return the findings that are new or over after an evaluation."""
        count = self.settings.evaluations
        if len(self._evaluations) < count:
            return []
        newest = list(self._evaluations)[-count:]
        slow = np.array([self._is_slow(one) for one in newest])
        over = [rank for rank in self._active if not slow[:, rank].any()]
        new = [
            rank
            for rank in np.flatnonzero(slow.all(axis=0)).tolist()
            if rank not in self._active
            and self._exceeds_variation(rank)
            and self._is_certain(rank, newest, observation)
        ]
        findings = [
            cleared(
                self._active.pop(rank),
                f"{self.generation.subject(rank)} evaluates as fast as its peers again.",
                observation.now_ns,
                newest[-1].step,
            )
            for rank in over
        ]
        for rank in new:
            self._active[rank] = self._report(rank, observation)
            findings.append(self._active[rank])
        return findings

    def _is_slow(self, one: _EvaluationTimes) -> npt.NDArray[np.bool_]:
        """Return the ranks that the others wait for, at a cost worth a report."""
        extra = np.nan_to_num(one.seconds - one.peers)
        least = max(self.settings.least_seconds, self.policy.notable_cost_share * one.since_seconds)
        slow: npt.NDArray[np.bool_] = extra >= least
        slow &= np.nan_to_num(one.seconds) >= self.settings.ratio * np.nan_to_num(one.peers)
        return slow

    def _is_certain(
        self, rank: int, newest: list[_EvaluationTimes], observation: Observation
    ) -> bool:
        """Return whether more is slow than a rank that waits for a CPU by chance."""
        seconds = sum(float(one.seconds[rank]) for one in newest)
        slowdown = seconds / sum(float(one.peers[rank]) for one in newest)
        share = cpu_wait_share(observation, self.generation)
        return slowdown >= largest_accident(share, seconds)

    def _exceeds_variation(self, rank: int) -> bool:
        """Return whether chance does not explain that the rank's newest evaluations are slow.

        They may have become slow at any of the stored ones, or be slow since the first.
        """
        ratios = np.log([one.seconds / one.peers for one in self._evaluations])
        onsets = range(len(ratios) - self.settings.evaluations + 1)
        chance = min(_chance(ratios, onset, rank, self.settings) for onset in onsets)
        return chance * len(onsets) * self.generation.topology.world_size <= self.settings.chance

    def _report(self, rank: int, observation: Observation) -> Finding:
        count = self.settings.evaluations
        earlier, newest = list(self._evaluations)[:-count], list(self._evaluations)[-count:]
        seconds = float(np.mean([one.seconds[rank] for one in newest]))
        peers = float(np.mean([one.peers[rank] for one in newest]))
        between = float(np.mean([one.since_seconds for one in newest]))
        # It must have become slower itself: its peers may have become faster.
        usual = [one.seconds[rank] for one in earlier if not self._is_slow(one)[rank]]
        began = bool(usual) and seconds >= self.settings.ratio * float(np.nanmedian(usual))
        cost = min((seconds - peers) / max(between, seconds), 1.0)
        onset, slowdown = newest[0], seconds / peers
        finding = self.finding(
            f"slow_evaluation:{rank}",
            cause=UNKNOWN,
            summary="",
            now_ns=observation.now_ns,
            rank=rank,
            step=newest[-1].step,
            cost_ratio=cost,
            speedup=gain(cost),
            slowdown=slowdown,
            evidence=[
                Evidence(
                    f"evaluations take {seconds:.2f} s, {peers:.2f} s on its peers",
                    "evaluation_seconds",
                    seconds,
                    peers,
                )
            ],
        )
        subject = self.generation.subject(rank)
        price = f"costs {percent(cost)} of all time; fixing it gives {gain(cost):.2f}x"
        if not began:
            return msgspec.structs.replace(
                finding,
                severity="info",
                cause="uneven evaluation",
                persistence="chronic",
                summary=f"{subject} evaluates {slowdown:.2f}x longer than its peers. It {price}.",
                advice=f"Give rank {rank} as much to evaluate as its peers.",
            )
        found = diagnose(rank, onset.started_ns, onset.step, observation, self.generation)
        return msgspec.structs.replace(
            finding,
            cause=found.cause,
            causes=found.causes,
            advice=found.advice,
            onset_step=onset.step,
            persistence="persistent",
            summary=(
                f"{subject} has evaluated {slowdown:.2f}x longer than its peers since the "
                f"evaluation in step {onset.step}, {because(found)}. It {price}."
            ),
            evidence=[*finding.evidence, *found.evidence],
            counter_evidence=found.counter_evidence,
        )


def _chance(ratios: Floats, onset: int, rank: int, settings: SlowEvaluationSettings) -> float:
    """Return the chance that a rank becomes so much slower at an evaluation without a reason.

    A t-test against the evaluations before it, or against equal ranks if it is the first one. What
    equal shards usually differ by counts as if it had been measured too.

    Args:
        ratios: logarithm of each rank's time over that of its peers; [evaluation, rank].
        onset: index of the evaluation.
    """
    parts = [ratios[:onset], ratios[onset:]] if onset else [ratios]
    means = [_means(part) for part in parts]
    rise = means[-1][rank] - (means[0][rank] if onset else 0.0)
    if not rise > 0.0:  # NaN: it did not evaluate before
        return 1.0
    squares = settings.known_evaluations * settings.usual_variation**2
    for part, mean in zip(parts, means, strict=True):
        squares += float(np.nansum((part - mean) ** 2))
    # The ratios of the ranks of one evaluation depend on each other: one of them is not free.
    ranks = int(np.isfinite(ratios).any(axis=0).sum())
    freedom = (len(ratios) - len(parts)) * (ranks - 1) + settings.known_evaluations
    t_squared = rise**2 / (squares / freedom * sum(1.0 / len(part) for part in parts))
    # An upper bound of one tail of Student's distribution.
    return float(0.5 * (1.0 + t_squared / freedom) ** (-0.5 * freedom))


def _means(ratios: Floats) -> Floats:
    """Return the mean of each rank over the evaluations in which it took part; else NaN."""
    known = np.isfinite(ratios)
    sums = np.where(known, ratios, 0.0).sum(axis=0)
    counts = np.where(known.any(axis=0), known.sum(axis=0), np.nan)
    means: Floats = sums / counts
    return means
