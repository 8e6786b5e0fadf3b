"""Detect ranks whose CPUs, memory or NIC are on another NUMA node than their GPU.

Every copy of such a rank to its GPU or NIC crosses the link between the sockets. The rank need not
be slow: this is advice. If it is a straggler, that finding names the misplacement as its cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline_server.detect.causes.catalog import NUMA_MISBINDING
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import MISPLACED_RANK, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy
from paceline_wire import metric_names

CHECK_INTERVAL_NS = 10 * 10**9
# A launcher may bind a rank only after its start; the agent measures every 10 to 30 s.
WARM_UP_NS = 30 * 10**9
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Misplacement:
    """One kind of misplacement. `metric` is 1 for a misplaced rank."""

    what: str
    metric: str
    cause: str
    text: str  # follows the rank in a sentence
    advice: str


MISPLACEMENTS = (
    Misplacement(
        "cpus",
        metric_names.RANK_NUMA_MISBOUND,
        NUMA_MISBINDING,
        "may only run on CPUs of a different NUMA node than its GPU",
        "Bind each rank to its GPU's NUMA node: `numactl --cpunodebind`, or as its launcher does.",
    ),
    Misplacement(
        "memory",
        metric_names.RANK_MEMORY_MISBOUND,
        NUMA_MISBINDING,
        "may not allocate memory on the NUMA node of its GPU",
        "Let each rank allocate memory on its GPU's NUMA node: `numactl --membind`, `--preferred`.",
    ),
    Misplacement(
        "nic",
        metric_names.RANK_NIC_MISPLACED,
        "distant NIC",
        "does not use the NIC nearest to its GPU",
        "List all NICs in NCCL_IB_HCA; `paceline_gpu_nearest_nic` shows which NIC is nearest to "
        "which GPU.",
    ),
)


class MisplacedRankDetector(Detector):
    """Finding kind `misplaced_rank`, fingerprint `misplaced_rank:cpus`, `:memory` or `:nic`.

    One finding for all ranks with the same misplacement, reported again if the ranks change.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (MISPLACED_RANK,)
    order: ClassVar[int] = 18

    def __init__(self, generation: Generation, policy: Policy) -> None:
        super().__init__(generation, policy)
        self._checked_ns: int | None = None
        self._active: dict[str, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        if (
            self._checked_ns is not None
            and observation.now_ns - self._checked_ns < CHECK_INTERVAL_NS
        ):
            return []
        self._checked_ns = observation.now_ns
        findings = []
        for misplacement in MISPLACEMENTS:
            ranks = self._misplaced(misplacement.metric, observation)
            active = self._active.get(misplacement.what)
            if ranks == (active.ranks if active is not None else []):
                continue
            if ranks:
                found = self._misplacement_finding(misplacement, ranks, observation.now_ns)
                self._active[misplacement.what] = found
                findings.append(found)
            elif active is not None:
                del self._active[misplacement.what]
                summary = f"Cleared: no rank {misplacement.text}."
                findings.append(cleared(active, summary, observation.now_ns))
        return findings

    def _misplaced(self, metric: str, observation: Observation) -> list[int]:
        since_ns = self.generation.started_ns + WARM_UP_NS
        found = []
        for rank, node in sorted(self.generation.nodes.items()):
            labels = {"job": self.generation.job, "rank": str(rank)}
            series = observation.telemetry.find(node, metric, **labels)
            if series is not None and series.latest() == 1.0:
                newest_ns = series.latest_ns()
                if newest_ns is not None and newest_ns >= since_ns:
                    found.append(rank)
        return found

    def _misplacement_finding(
        self, misplacement: Misplacement, ranks: list[int], now_ns: int
    ) -> Finding:
        rank = ranks[0] if len(ranks) == 1 else None
        text = misplacement.text
        subject = self.generation.subject(rank)
        if rank is None:
            subject = f"Each of {len(ranks):,} ranks"
        evidence = [
            Evidence(f"{self.generation.rank_text(each)} {text}", misplacement.metric, 1.0, 0.0)
            for each in ranks[:_MAX_RANKS_SHOWN]
        ]
        return self.finding(
            f"misplaced_rank:{misplacement.what}",
            cause=misplacement.cause,
            summary=f"{subject} {text}.",
            now_ns=now_ns,
            rank=rank,
            ranks=ranks,
            advice=misplacement.advice,
            persistence="chronic",
            evidence=evidence,
        )
