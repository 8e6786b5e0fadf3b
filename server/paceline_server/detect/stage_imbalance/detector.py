"""Reports pipelines whose stages do not take equally long: all stages wait for the longest one.

A stage's time is the median of its ranks, so that one slow rank does not make its stage slow. If
stages are uneven from the first steps on, the division of the model is the reason: the finding is
advice, with the layers to move and the gain. A stage that becomes slow later is a straggler.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import STAGE_IMBALANCE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.detect.stage_imbalance.layers import Balance, balance, moves_text
from paceline_server.detect.stage_imbalance.settings import DEFAULTS, StageImbalanceSettings
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.grid import grid_of
from paceline_server.steps.phase import PipelinePhaseReader
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

CAUSE = "uneven stages"


class StageImbalanceDetector(Detector):
    """Finding kind `stage_imbalance`, fingerprint `stage_imbalance:STAGE`."""

    kinds: ClassVar[tuple[Kind, ...]] = (STAGE_IMBALANCE,)
    order: ClassVar[int] = 12

    def __init__(
        self, generation: Generation, policy: Policy, settings: StageImbalanceSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        topology = generation.topology
        self._stages = topology.pp
        self._grid = grid_of(topology)
        self._reader = PipelinePhaseReader(topology)
        self._rows: list[Floats] = []  # log seconds of each stage's typical rank
        self._steps: list[int] = []
        self._newest: StepTiming | None = None
        self._active: Finding | None = None
        self._judged = 0  # number of judged steps

    def update(self, observation: Observation) -> list[Finding]:
        findings: list[Finding] = []
        if self._stages < 2:
            return findings
        for timing in self.after_warmup(observation.timings):
            if self._measure(timing):
                findings += self._judge(observation)
        return findings

    def _measure(self, timing: StepTiming) -> bool:
        """Append the seconds of each stage; return False if a stage is missing."""
        ranks = timing.ranks
        stage = self._grid.stage[ranks.rank]
        known = ranks.self_seconds > 0
        middle = np.full(self._stages, np.nan)
        for number in range(self._stages):
            seconds = ranks.self_seconds[known & (stage == number)]
            if seconds.size:
                middle[number] = median(seconds)
        if np.isnan(middle).any():
            return False
        self._rows.append(np.log(middle))
        self._steps.append(timing.step)
        self._newest = timing
        self._judged += 1
        for history in (self._rows, self._steps):
            del history[: -self.settings.steps]
        return True

    def _judge(self, observation: Observation) -> list[Finding]:
        if self._active is not None:
            return self._recovered(observation) if self._judged % self.settings.steps == 0 else []
        # Slowness that begins later is not a property of the model.
        return self._chronic(observation) if self._judged <= self.settings.steps else []

    def _chronic(self, observation: Observation) -> list[Finding]:
        """Return a finding if the first steps are uneven because of how the model was divided."""
        settings = self.settings
        count = len(self._rows)
        if count < settings.fewest_steps:
            return []
        seconds = np.exp(np.array(self._rows))
        ratios = seconds / seconds.mean(axis=1, keepdims=True)
        stage = int(ratios.mean(axis=0).argmax())
        own = ratios[:, stage]
        # Few steps are enough if they agree; once all first steps are complete, their median
        # decides.
        error = settings.significance * float(own.std(ddof=1)) / math.sqrt(count)
        surely = float(own.min()) >= settings.ratio + error
        if not surely and (count < settings.steps or median(own) < settings.ratio):
            return []
        if observation.stragglers & set(self._grid.ranks[stage].ravel().tolist()):
            return []
        found = self._balance(observation)
        assert self._newest is not None
        step_seconds = median(self._newest.ranks.step_seconds)
        typical = np.median(seconds, axis=0)
        saved = (
            float(typical.max() - typical.mean())
            if found is None
            else found.now_seconds - found.even_seconds
        )
        cost = min(max(saved / max(step_seconds, 1e-9), 0.0), 1.0)
        if gain(cost) < settings.least_gain:
            return []
        advice, best = _advice(found, stage, typical, step_seconds, cost)
        self._active = self._finding(stage, median(own), cost, best, observation, advice)
        return [self._active]

    def _recovered(self, observation: Observation) -> list[Finding]:
        """Clear the finding if the stage is no longer slow."""
        recent = np.exp(np.median(np.array(self._rows[-self.settings.steps :]), axis=0))
        halfway = 1.0 + (self.settings.ratio - 1.0) / 2.0
        active = self._active
        if active is None or active.stage is None:
            return []
        if recent[active.stage] / recent.mean() >= halfway:
            return []
        self._active = None
        summary = f"Stage {active.stage} is no longer slower than the other stages."
        return [cleared(active, summary, observation.now_ns, self._steps[-1])]

    def _balance(self, observation: Observation) -> Balance | None:
        phase = None if self._newest is None else self._reader.read(self._newest)
        return None if phase is None else balance(phase, observation.metadata)

    def _finding(
        self,
        stage: int,
        ratio: float,
        cost: float,
        speedup: float,
        observation: Observation,
        advice: str,
    ) -> Finding:
        return self.finding(
            f"stage_imbalance:{stage}",
            cause=CAUSE,
            summary=(
                f"Stage {stage} takes {ratio:.2f}x the mean time of all stages. It "
                f"{cost_text(cost, speedup)}. {advice}"
            ),
            now_ns=observation.now_ns,
            stage=stage,
            ranks=sorted(self._grid.ranks[stage].ravel().tolist()),
            onset_step=self._steps[0],
            step=self._steps[-1],
            slowdown=ratio,
            cost_ratio=cost,
            speedup=speedup,
            persistence="chronic",
            advice=advice,
            evidence=[
                Evidence(
                    "compute time per step of stage "
                    f"{number}: {math.exp(float(self._rows[-1][number])) * 1e3:.0f} ms",
                    "self_seconds",
                    math.exp(float(self._rows[-1][number])),
                )
                for number in range(min(self._stages, 16))
            ],
        )


def _advice(
    found: Balance | None, stage: int, seconds: Floats, step_seconds: float, cost: float
) -> tuple[str, float]:
    """Return the advised change and its speedup."""
    if found is not None and found.moves and found.moved_seconds is not None:
        saved = found.now_seconds - found.moved_seconds
        best = gain(saved / max(step_seconds, 1e-9))
        text = moves_text(found)
        return f"{text[0].upper()}{text[1:]} gives {best:.2f}x.", best
    share, even = seconds[stage] / seconds.sum(), 1.0 / seconds.size
    text = (
        f"Stage {stage} has {percent(share)} of the compute; an even share ({percent(even)}) "
        f"gives {gain(cost):.2f}x."
    )
    if found is not None and found.layers:
        text += " Moving whole layers does not help; smaller parts (virtual stages) may."
    return text, gain(cost)
