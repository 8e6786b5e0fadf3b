"""Detect nodes on which other load slows all ranks together in some steps.

Examples are a backup, a scan, or another container. It differs from a slow node by being irregular,
and from a slow rank by affecting all ranks of the node at once. The node's own metrics must confirm
it: tasks wait for a CPU, or switch context far more often than on other nodes. Without such
evidence nothing is reported. Load on a node is no reason to restart a job.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import CPU_CONTENTION
from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_noise.settings import DEFAULTS, HostNoiseSettings
from paceline_server.detect.kinds import HOST_NOISE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming
from paceline_wire import metric_names

Floats = npt.NDArray[np.float64]

PRESSURE = metric_names.PRESSURE_CPU_WAITING_SECONDS_TOTAL
SWITCHES = metric_names.NODE_CONTEXT_SWITCHES_TOTAL
CHECK_EVERY_STEPS = 4
_USUAL_QUANTILE = 0.2


class HostNoiseDetector(Detector):
    """Finding kind `host_noise`, fingerprint `host_noise:NODE`."""

    kinds: ClassVar[tuple[Kind, ...]] = (HOST_NOISE,)
    order: ClassVar[int] = 16

    def __init__(
        self, generation: Generation, policy: Policy, settings: HostNoiseSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        world = generation.topology.world_size
        ranks: dict[str, list[int]] = {}
        for rank in range(world):
            node = generation.node(rank)
            if node is not None:
                ranks.setdefault(node, []).append(rank)
        # Comparing needs several nodes, with several ranks each.
        self._ranks = {node: members for node, members in ranks.items() if len(members) > 1}
        self._is_comparable = len(ranks) > 1
        self._rows = np.full((settings.window_steps, world), np.nan)
        self._steps: list[int] = []
        self._started_ns: list[int] = []
        self._seconds: list[float] = []
        self._active: dict[str, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        if not self._is_comparable:
            return []
        for timing in self.after_warmup(observation.timings):
            if timing.ranks.rank.size:
                self._add_step(timing)
        full = len(self._steps) == len(self._rows)
        if not observation.timings or not full or self._steps[-1] % CHECK_EVERY_STEPS:
            return []
        return self._judge(observation)

    def _add_step(self, timing: StepTiming) -> None:
        self._rows[:-1] = self._rows[1:]
        self._rows[-1] = np.nan
        self._rows[-1, timing.ranks.rank] = timing.ranks.self_seconds
        # Steps with different sequence lengths do not indicate host load.
        if timing.compute.tokens.size and np.ptp(timing.compute.tokens) > 0:
            self._rows[-1] = np.nan
        self._steps.append(timing.step)
        self._started_ns.append(int(timing.ranks.start_ns.min()))
        self._seconds.append(median(timing.ranks.step_seconds))
        for values in (self._steps, self._started_ns, self._seconds):
            del values[: -len(self._rows)]

    def _judge(self, observation: Observation) -> list[Finding]:
        slowness = self._slowness()
        limit = self.settings.slowdown - 1.0
        slow = {node: values >= limit for node, values in slowness.items()}
        irregular = [node for node in self._ranks if self._is_irregular(slow[node])]
        quiet = [node for node in self._active if not slow[node].any()]
        findings = [self._recovered(node, observation.now_ns) for node in quiet]
        suspects = [
            node
            for node in irregular
            if node not in self._active and not self._has_straggler(node, observation)
        ]
        for node, evidence in self._pressure(suspects, observation).items():
            self._active[node] = self._finding(
                node, slow[node], slowness[node], evidence, observation
            )
            findings.append(self._active[node])
        return findings

    def _slowness(self) -> dict[str, Floats]:
        """Return, by node and step, the relative slowdown of its ranks minus that of all ranks."""
        rows = np.where(self._rows > 0, self._rows, np.nan)
        known = ~np.isnan(rows)
        if not (known.any(axis=0).all() and known.any(axis=1).all()):
            return {node: np.zeros(len(rows)) for node in self._ranks}
        # Most steps of the window may be noisy, so the faster steps define the usual speed.
        place = (_USUAL_QUANTILE * (known.sum(axis=0) - 1)).astype(np.int64)
        usual = np.sort(rows, axis=0)[place, np.arange(rows.shape[1])]
        relative = np.nan_to_num(rows / usual - 1.0)
        everyone = np.median(relative, axis=1)
        return {
            node: relative[:, ranks].min(axis=1) - everyone for node, ranks in self._ranks.items()
        }

    def _is_irregular(self, slow: npt.NDArray[np.bool_]) -> bool:
        """Return whether steps are slow often enough, in several periods, and not always."""
        settings = self.settings
        stretches = int((np.diff(slow.astype(np.int8), prepend=0) == 1).sum())
        share = float(slow.mean())
        return (
            stretches >= settings.stretches and settings.least_share <= share <= settings.most_share
        )

    def _has_straggler(self, node: str, observation: Observation) -> bool:
        return any(rank in observation.stragglers for rank in self._ranks[node])

    def _pressure(self, suspects: list[str], observation: Observation) -> dict[str, list[Evidence]]:
        """Return the metrics that confirm the load, for the nodes that have any."""
        found: dict[str, list[Evidence]] = {}
        if not suspects:
            return found
        for name, least, text in (
            (
                PRESSURE,
                self.settings.pressure,
                "tasks on {node} wait for a CPU for {share} of the time",
            ),
            (SWITCHES, 0.0, "{node} has {rate:,.0f} context switches/s"),
        ):
            rates = {
                node: rate
                for node in sorted(set(self.generation.nodes.values()))
                if (rate := self._rate(node, name, observation)) is not None
            }
            for node in suspects:
                others = [rate for other, rate in rates.items() if other != node]
                if node not in rates or not others:
                    continue
                rate, normal = rates[node], median(others)
                if rate >= least and rate >= self.settings.ratio * max(normal, 1e-9):
                    line = text.format(node=node, rate=rate, share=percent(rate))
                    found.setdefault(node, []).append(Evidence(line, name, rate, normal))
        return found

    def _rate(self, node: str, name: str, observation: Observation) -> float | None:
        series = observation.telemetry.find(node, name)
        return None if series is None else series.rate_since(self._started_ns[0])

    def _finding(
        self,
        node: str,
        slow: npt.NDArray[np.bool_],
        slowness: Floats,
        evidence: list[Evidence],
        observation: Observation,
    ) -> Finding:
        ranks = self._ranks[node]
        lost = float(np.where(slow, slowness, 0.0).mean())
        usual = float(np.nanmedian(self._rows[:, ranks]))
        cost = min(lost * usual / max(median(self._seconds), 1e-9), 1.0)
        factor = 1.0 + median(slowness[slow])
        first = int(np.flatnonzero(slow)[0])
        diagnosis = diagnose(
            None,
            self._started_ns[first],
            self._steps[first],
            observation,
            self.generation,
            kind="host_noise",
            node=node,
        )
        metrics = {line.metric for line in evidence}
        more = [line for line in diagnosis.evidence if line.metric not in metrics]
        against = [line for line in diagnosis.counter_evidence if line.metric not in metrics]
        return self.finding(
            f"host_noise:{node}",
            cause=CPU_CONTENTION,
            summary=(
                f"All ranks on {node} are {factor:.2f}x slower in {slow.sum()} of the last "
                f"{len(slow)} steps while the host is busy: this {cost_text(cost, gain(cost))}."
            ),
            now_ns=observation.now_ns,
            node=node,
            ranks=ranks,
            onset_step=self._steps[first],
            step=self._steps[-1],
            slowdown=factor,
            cost_ratio=cost,
            speedup=gain(cost),
            persistence="transient",
            severity="warning" if cost >= self.settings.warning_cost_ratio else "info",
            advice=(
                f"Find what else runs on {node}, and reserve CPUs for the ranks (cpuset, isolcpus)."
            ),
            causes=diagnosis.causes,
            evidence=[*evidence, *more],
            counter_evidence=against,
        )

    def _recovered(self, node: str, now_ns: int) -> Finding:
        summary = f"{node} no longer slows its ranks."
        return cleared(self._active.pop(node), summary, now_ns, self._steps[-1])
