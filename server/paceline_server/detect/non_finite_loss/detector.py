"""Flags a loss that is no number: what is computed from here on is worthless."""

from __future__ import annotations

import math
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import FAILURE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy


class NonFiniteLossDetector(Detector):
    """Finding kind `failure`, cause `non-finite loss`, fingerprint `failure:loss`.

    A checkpoint taken now would keep the damage: a restart goes back to an earlier one.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE,)
    order: ClassVar[int] = 33

    def __init__(self, generation: Generation, policy: Policy) -> None:
        super().__init__(generation, policy)
        self._told = False

    def update(self, seen: Observation) -> list[Finding]:
        bad = [
            (step, rank, loss)
            for rank, (step, loss) in seen.losses.items()
            if not math.isfinite(loss)
        ]
        if self._told or not bad:
            return []
        self._told = True
        step, rank, loss = min(bad)
        finite = [loss for _, loss in seen.losses.values() if math.isfinite(loss)]
        evidence = [
            Evidence(f"rank {one} reported loss {value} at step {at}")
            for at, one, value in sorted(bad)
        ]
        # Usually all report the mean over the job; only a loss that is one rank's own names it.
        is_own = len(bad) == 1 and bool(finite)
        return [
            self.finding(
                "failure:loss",
                cause="non-finite loss",
                summary=f"The loss is {loss} at step {step}: what follows is worthless.",
                now_ns=seen.now_ns,
                rank=rank if is_own else None,
                onset_step=step,
                step=step,
                can_checkpoint=False,
                evidence=evidence[:8],
            )
        ]
