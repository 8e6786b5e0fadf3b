"""Reports the cost of uneven routing, such as of tokens to the experts of a mixture of experts.

The ranks exchange tokens in all-to-alls, and each computes on what it receives. A rank that
receives more takes longer, and all others wait for it. Its hardware is not at fault, so the
finding is advice. The cost is the time of the slowest rank beyond the mean of its stage, which it
would take if all received the same.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.calm import Calm
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import ROUTING_IMBALANCE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.detect.routing_imbalance.settings import DEFAULTS, RoutingImbalanceSettings
from paceline_server.medians import median
from paceline_server.policy import Policy
from paceline_server.steps.timing import RankTimes

Floats = npt.NDArray[np.float64]

CAUSE = "uneven routing"
ADVICE = (
    "Balance the routing: a larger auxiliary loss or a bias per expert, a capacity limit, or other "
    "experts on this rank."
)


class RoutingImbalanceDetector(Detector):
    """Finding kind `routing_imbalance`, fingerprint `routing_imbalance`. Advice only."""

    kinds: ClassVar[tuple[Kind, ...]] = (ROUTING_IMBALANCE,)
    order: ClassVar[int] = 15

    def __init__(
        self, generation: Generation, policy: Policy, settings: RoutingImbalanceSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._recent: deque[RankTimes] = deque(maxlen=settings.steps)
        self._active: Finding | None = None
        self._calm = Calm(settings.calm_seconds)

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            everyone = timing.ranks.rank.size == self.generation.topology.world_size
            if not everyone or not timing.ranks.routed_bytes.all():
                continue
            self._recent.append(timing.ranks)
            if len(self._recent) == self.settings.steps:
                findings += self._judge(timing.step, observation.now_ns)
                self._recent.clear()
        return findings

    def _judge(self, step: int, now_ns: int) -> list[Finding]:
        shape = (len(self._recent), self.generation.topology.pp, -1)  # [step, stage, rank of stage]
        routed = np.array([ranks.routed_bytes for ranks in self._recent], dtype=np.float64)
        routed = routed.reshape(shape)
        own = np.array([ranks.self_seconds for ranks in self._recent]).reshape(shape)
        step_seconds = np.array([median(ranks.step_seconds) for ranks in self._recent])
        lost = (own.max(axis=2) - own.mean(axis=2)).max(axis=1)
        cost = min(float(lost.sum() / max(step_seconds.sum(), 1e-9)), 1.0)
        is_enough = _explained(own, routed) >= self.settings.explained
        if self._active is not None:
            is_absent = not is_enough or cost < self.settings.cost_ratio / 2
            if not self._calm.ends(is_absent=is_absent, now_ns=now_ns):
                return []
            active, self._active = self._active, None
            return [cleared(active, "Uneven routing no longer costs much.", now_ns, step)]
        if not is_enough or cost < self.settings.cost_ratio:
            return []
        self._active = self._finding(routed, cost, step, now_ns)
        return [self._active]

    def _finding(self, routed: Floats, cost: float, step: int, now_ns: int) -> Finding:
        relative = (routed / routed.mean(axis=2, keepdims=True)).reshape(len(routed), -1)
        most = relative.argmax(axis=1)
        usual = int(np.bincount(most).argmax())
        is_usual = float((most == usual).mean()) >= self.settings.usual_share
        rank = usual if is_usual else None
        ratio = float(relative.max(axis=1).mean())
        per_step = routed.reshape(relative.shape) / 1e6
        who = "One rank, not always the same," if rank is None else self.generation.subject(rank)
        return self.finding(
            "routing_imbalance",
            cause=CAUSE,
            summary=(
                f"{who} receives {ratio:.1f}x as much as the mean rank in all-to-alls, because the "
                f"routing of the model is uneven. It {cost_text(cost, gain(cost))}."
            ),
            now_ns=now_ns,
            rank=rank,
            step=step,
            cost_ratio=cost,
            speedup=gain(cost),
            persistence="chronic",
            advice=ADVICE,
            evidence=[
                Evidence(
                    f"in the last {len(routed)} steps all-to-alls brought a rank "
                    f"{per_step.min():.3g} to {per_step.max():.3g} MB per step",
                    "routed_bytes",
                    float(routed.max()),
                    float(routed.mean()),
                )
            ],
        )


def _explained(own: Floats, routed: Floats) -> float:
    """Return the share of the variance of the ranks' own time that what they receive explains."""
    seconds = (own / np.maximum(own.mean(axis=2, keepdims=True), 1e-9)).ravel()
    received = (routed / routed.mean(axis=2, keepdims=True)).ravel()
    if seconds.std() == 0 or received.std() == 0:
        return 0.0
    correlation = float(np.corrcoef(seconds, received)[0, 1])
    return max(correlation, 0.0) ** 2
