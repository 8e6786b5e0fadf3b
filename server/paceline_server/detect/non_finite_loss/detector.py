"""Detect a loss that is NaN or infinite: all later steps are useless."""

from __future__ import annotations

import math
from typing import ClassVar

from paceline_server.detect.causes.catalog import NON_FINITE_LOSS
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import FAILURE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy


class NonFiniteLossDetector(Detector):
    """Finding kind `failure`, cause `non-finite loss`, fingerprint `failure:loss`.

    A checkpoint saved now would contain the damage, so a restart uses an earlier one.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE,)
    order: ClassVar[int] = 33

    def __init__(self, generation: Generation, policy: Policy) -> None:
        super().__init__(generation, policy)
        self._is_reported = False
        self._good_step: int | None = None  # newest step whose losses were all finite

    def update(self, observation: Observation) -> list[Finding]:
        non_finite = [
            (step, rank, loss)
            for rank, (step, loss) in observation.losses.items()
            if not math.isfinite(loss)
        ]
        if self._is_reported or not non_finite:
            if not non_finite and observation.losses:
                self._good_step = min(step for step, _ in observation.losses.values())
            return []
        self._is_reported = True
        step, rank, loss = min(non_finite)
        finite = [loss for _, loss in observation.losses.values() if math.isfinite(loss)]
        evidence = [
            Evidence(f"rank {bad_rank} reported loss {value} at step {bad_step}")
            for bad_step, bad_rank, value in sorted(non_finite)
        ]
        # Ranks usually report the mean over the job. A rank is named only if it alone reports a
        # non-finite loss.
        is_own = len(non_finite) == 1 and bool(finite)
        return [
            self.finding(
                "failure:loss",
                cause=NON_FINITE_LOSS,
                summary=f"The loss is {loss} at step {step}: all later steps are useless.",
                now_ns=observation.now_ns,
                rank=rank if is_own else None,
                onset_step=step if self._good_step is None else min(step, self._good_step + 1),
                step=step,
                can_checkpoint=False,
                evidence=evidence[:8],
            )
        ]
