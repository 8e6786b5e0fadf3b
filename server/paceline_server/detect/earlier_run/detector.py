"""Detect ranks of an earlier run that still run beside the current one (split-brain).

A launcher that loses contact to its daemon on a node restarts the job on other nodes, while the
processes on that node live on. What they send is not mixed with the current run, but they can still
write to the job's checkpoints and files.
"""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.earlier_run.settings import DEFAULTS, EarlierRunSettings
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import EARLIER_RUN, Kind
from paceline_server.detect.observation import EarlierRank, Generation, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_server.policy import Policy


class EarlierRunDetector(Detector):
    """Finding kind `earlier_run`, fingerprint `earlier_run:AGENT`."""

    kinds: ClassVar[tuple[Kind, ...]] = (EARLIER_RUN,)
    order: ClassVar[int] = 60

    def __init__(
        self, generation: Generation, policy: Policy, settings: EarlierRunSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._reported: dict[str, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        now_ns = observation.now_ns
        if now_ns - self.generation.started_ns < self.settings.grace_seconds * 1e9:
            return []
        running: dict[str, list[EarlierRank]] = defaultdict(list)
        for rank in observation.earlier_ranks:
            if now_ns - rank.received_ns < self.settings.gone_after_seconds * 1e9:
                running[rank.node].append(rank)
        findings = []
        for node in sorted(self._reported.keys() - running.keys()):
            summary = f"No rank of an earlier run is running on {node} any longer."
            findings.append(cleared(self._reported.pop(node), summary, now_ns))
        for node in sorted(running.keys() - self._reported.keys()):
            self._reported[node] = self._found(node, running[node], now_ns)
            findings.append(self._reported[node])
        return findings

    def _found(self, node: str, running: list[EarlierRank], now_ns: int) -> Finding:
        ranks = sorted({rank.rank for rank in running})
        generations = sorted({rank.generation for rank in running})
        text = ranks_text(ranks)
        return self.finding(
            f"earlier_run:{node}",
            cause="split-brain",
            summary=f"{text[0].upper()}{text[1:]} of an earlier run still runs on {node} beside "
            "the current run, and may write to its checkpoints.",
            now_ns=now_ns,
            node=node,
            stage=None,
            ranks=ranks,
            advice=f"End these processes on {node}. The launcher's daemon there (slurmd) did not: "
            "check whether it runs.",
            evidence=[
                Evidence(
                    f"{text} of generation {rank.generation} reported step {rank.step}"
                    if rank.step is not None
                    else f"{text} of generation {rank.generation} reported its state"
                )
                for rank in running
                if rank.rank == ranks[0] and rank.generation == generations[-1]
            ],
        )
