"""Names ranks that run, have their memory, or reach the network on the wrong side of their node.

Each copy of such a rank to its GPU or NIC crosses the link between the sockets. Nothing need be
slow yet: it is advice. Where it makes a straggler, that finding tells it as the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import MISPLACED_RANK, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy
from paceline_wire import metric_names

BETWEEN_LOOKS_NS = 10 * 10**9
# A launcher may bind a rank only after its start; the agent looks every 10 to 30 s.
SETTLING_NS = 30 * 10**9
_NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class Misplacement:
    """What the agents measure of it (1: misplaced), and how it is told."""

    what: str
    metric: str
    cause: str
    text: str  # of the ranks
    advice: str


MISPLACEMENTS = (
    Misplacement(
        "cpus",
        metric_names.RANK_NUMA_MISBOUND,
        "NUMA misbinding",
        "may run only on CPUs of another NUMA node than its GPU's",
        "Bind each rank to its GPU's NUMA node: `numactl --cpunodebind`, or as its launcher does.",
    ),
    Misplacement(
        "memory",
        metric_names.RANK_MEMORY_MISBOUND,
        "NUMA misbinding",
        "may not have memory on its GPU's NUMA node",
        "Let each rank have memory on its GPU's NUMA node: `numactl --membind` or `--preferred`.",
    ),
    Misplacement(
        "nic",
        metric_names.RANK_NIC_MISPLACED,
        "distant NIC",
        "does not use the NIC next to its GPU",
        "Let NCCL_IB_HCA name all NICs that are to be used; `paceline_gpu_nearest_nic` says "
        "which is next to which GPU.",
    ),
)


class MisplacedRankDetector(Detector):
    """Finding kind `misplaced_rank`, fingerprint `misplaced_rank:cpus`, `:memory` or `:nic`.

    One for all ranks that are misplaced alike, told again when they are others. Severity info.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (MISPLACED_RANK,)
    order: ClassVar[int] = 18

    def __init__(self, generation: Generation, policy: Policy) -> None:
        super().__init__(generation, policy)
        self._looked_ns: int | None = None
        self._told: dict[str, Finding] = {}

    def update(self, seen: Observation) -> list[Finding]:
        if self._looked_ns is not None and seen.now_ns - self._looked_ns < BETWEEN_LOOKS_NS:
            return []
        self._looked_ns = seen.now_ns
        findings = []
        for misplacement in MISPLACEMENTS:
            ranks = self._misplaced(misplacement.metric, seen)
            told = self._told.get(misplacement.what)
            if ranks == (told.ranks if told is not None else []):
                continue
            if ranks:
                found = self._finding(misplacement, ranks, seen.now_ns)
                self._told[misplacement.what] = found
                findings.append(found)
            elif told is not None:
                del self._told[misplacement.what]
                summary = f"No rank {misplacement.text} any more."
                findings.append(cleared(told, summary, seen.now_ns))
        return findings

    def _misplaced(self, metric: str, seen: Observation) -> list[int]:
        since_ns = self.generation.started_ns + SETTLING_NS
        found = []
        for rank, node in sorted(self.generation.nodes.items()):
            labels = {"job": self.generation.job, "rank": str(rank)}
            series = seen.telemetry.find(node, metric, **labels)
            if series is not None and series.latest() == 1.0:
                newest_ns = series.latest_ns()
                if newest_ns is not None and newest_ns >= since_ns:
                    found.append(rank)
        return found

    def _finding(self, misplacement: Misplacement, ranks: list[int], now_ns: int) -> Finding:
        alone = ranks[0] if len(ranks) == 1 else None
        text = misplacement.text
        who = self.generation.subject(alone)
        if alone is None:
            who = f"Each of {len(ranks)} ranks"
        evidence = [
            Evidence(f"{self.generation.rank_text(rank)} {text}", misplacement.metric, 1.0, 0.0)
            for rank in ranks[:_NAMED_AT_MOST]
        ]
        return self.finding(
            f"misplaced_rank:{misplacement.what}",
            cause=misplacement.cause,
            summary=f"{who} {text}.",
            now_ns=now_ns,
            rank=alone,
            ranks=ranks,
            advice=misplacement.advice,
            persistence="chronic",
            evidence=evidence,
        )
