"""Reports that the CPUs are so busy that a slow rank cannot be distinguished from chance.

Ranks that are ready to run wait for a CPU, each at other times, so their steps differ for no reason
of their own. Straggler verdicts within that noise are held back; this finding says so.
"""

from __future__ import annotations

from typing import ClassVar

from paceline_server.detect.busy_host.settings import DEFAULTS, BusyHostSettings
from paceline_server.detect.causes.catalog import CPU_CONTENTION
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import WAIT, cpu_wait_share, largest_accident
from paceline_server.detect.kinds import HOST_NOISE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.percent import percent
from paceline_server.policy import Policy


class BusyHostDetector(Detector):
    """Finding kind `host_noise`, fingerprint `host_noise:busy`, always information."""

    kinds: ClassVar[tuple[Kind, ...]] = (HOST_NOISE,)
    order: ClassVar[int] = 17

    def __init__(
        self, generation: Generation, policy: Policy, settings: BusyHostSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._since_ns: int | None = None  # when the share last crossed its threshold
        self._checked_ns = 0
        self._active: Finding | None = None

    def update(self, observation: Observation) -> list[Finding]:
        settings, now_ns = self.settings, observation.now_ns
        if not observation.timings or now_ns < self._checked_ns + settings.check_seconds * 1e9:
            return []
        self._checked_ns = now_ns
        share = cpu_wait_share(observation, self.generation)
        if share is None:
            return []
        is_busy = share >= (settings.over if self._active else settings.share)
        if is_busy == (self._active is not None):
            self._since_ns = None
            return []
        self._since_ns = now_ns if self._since_ns is None else self._since_ns
        if now_ns - self._since_ns < settings.lasting_seconds * 1e9:
            return []
        self._since_ns = None
        if self._active is not None:
            over, self._active = self._active, None
            return [cleared(over, "The CPUs are no longer too busy for a verdict.", now_ns)]
        self._active = self._finding(share, observation)
        return [self._active]

    def _finding(self, share: float, observation: Observation) -> Finding:
        least = largest_accident(share, 0.0)
        return self.finding(
            "host_noise:busy",
            cause=CPU_CONTENTION,
            summary=(
                f"The CPUs are too busy for a verdict about ranks that are less than {least:.1f}x "
                f"slower: a rank waits for a CPU for {percent(share)} of the time."
            ),
            now_ns=observation.now_ns,
            step=observation.timings[-1].step,
            persistence="persistent",
            severity="info",
            advice=(
                "Give each rank a CPU of its own: fewer ranks or loader workers per node, or "
                "nothing else on the node (cpuset, isolcpus)."
            ),
            evidence=[
                Evidence(
                    f"the median rank was ready to run without a CPU for {percent(share)} of the "
                    "time",
                    WAIT,
                    share,
                    0.0,
                )
            ],
        )
