"""Reports that the CPUs are so busy that a slow rank cannot be distinguished from chance.

Ranks that are ready to run wait for a CPU, each at other times, so their steps differ for no reason
of their own. Straggler verdicts within that noise are held back; this finding says so, and how slow
a rank must be to be found: slower than such waits explain, and than the ranks' steps scatter.
"""

from __future__ import annotations

import math
from typing import ClassVar

from paceline_server.detect.busy_host.settings import DEFAULTS, BusyHostSettings
from paceline_server.detect.causes.catalog import CPU_CONTENTION
from paceline_server.detect.causes.other_processes import other_processes
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import (
    RECENT_NS,
    WAIT,
    cpu_wait_share,
    largest_accident,
)
from paceline_server.detect.kinds import HOST_NOISE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import is_alike
from paceline_server.percent import percent
from paceline_server.policy import Policy

_NAMED = 0.5  # CPUs from which a process that belongs to no rank is named in the summary
ALIKE = 0.5  # relative change of the hidden excess that is too small to report again


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
        self._least = 1.0  # slowdown below which the active finding says that nothing is found

    def update(self, observation: Observation) -> list[Finding]:
        settings, now_ns = self.settings, observation.now_ns
        if not observation.timings or now_ns < self._checked_ns + settings.check_seconds * 1e9:
            return []
        self._checked_ns = now_ns
        share = cpu_wait_share(observation, self.generation)
        if share is None:
            return []
        hidden = observation.hidden_slowdown
        hidden = 1.0 if math.isinf(hidden) else hidden
        least = max(largest_accident(share, 0.0), hidden)
        if self._is_busy(share, hidden) == (self._active is not None):
            self._since_ns = None
            return self._renewed(share, least, observation)
        self._since_ns = now_ns if self._since_ns is None else self._since_ns
        if now_ns - self._since_ns < settings.lasting_seconds * 1e9:
            return []
        self._since_ns = None
        if self._active is not None:
            over, self._active = self._active, None
            return [cleared(over, "The CPUs are no longer too busy for a verdict.", now_ns)]
        return [self._report(share, least, observation)]

    def _is_busy(self, share: float, hidden: float) -> bool:
        """Return whether so much is hidden, or still is, on a host whose ranks wait for CPUs."""
        settings = self.settings
        hides = self._active is not None or hidden >= largest_accident(settings.share, 0.0)
        return share >= (settings.over if hides else settings.share)

    def _renewed(self, share: float, least: float, observation: Observation) -> list[Finding]:
        """Return the active finding with what is hidden now, if that has changed for long."""
        if self._active is None or is_alike(least - 1.0, self._least - 1.0, ALIKE):
            return []
        if observation.now_ns - self._active.detected_ns < self.settings.renewal_seconds * 1e9:
            return []
        return [self._report(share, least, observation)]

    def _report(self, share: float, least: float, observation: Observation) -> Finding:
        self._least = least
        waits = f"a rank waits for a CPU for {percent(share)} of the time"
        if least > largest_accident(share, 0.0):
            waits += ", and the steps of the ranks differ by chance"
        others = other_processes(
            observation.telemetry,
            sorted(set(self.generation.nodes.values())),
            observation.now_ns - RECENT_NS,
            observation.now_ns,
        )
        busiest = f" {others[0].text}." if others and (others[0].value or 0.0) >= _NAMED else ""
        self._active = self.finding(
            "host_noise:busy",
            cause=CPU_CONTENTION,
            summary=(
                f"The CPUs are too busy for a verdict about ranks that are less than {least:.1f}x "
                f"slower: {waits}.{busiest}"
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
                ),
                *others,
            ],
        )
        return self._active
