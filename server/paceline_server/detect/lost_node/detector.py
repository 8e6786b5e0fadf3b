"""Flags nodes whose agent has fallen silent."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import FAILURE, Kind
from paceline_server.detect.lost_node.settings import DEFAULTS, LostNodeSettings
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy

_NEARLY_ALL = 0.9


class LostNodeDetector(Detector):
    """Finding kind `failure`, cause `node lost`, fingerprint `failure:node:AGENT`.

    Silence counts only while we listened ourselves: after a pause of the server every node seems
    to have been silent. When all nodes of several are silent at once, it is our network that is
    down, and nothing is said. And when what others say comes late, because the server was stopped,
    has too much to do or refuses what it cannot store, then so may what this one said: it has that
    much longer.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE,)
    order: ClassVar[int] = 30

    def __init__(
        self, generation: Generation, policy: Policy, settings: LostNodeSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._listening_since_ns: int | None = None
        self._last_tick_ns = 0
        self._lost: dict[str, Finding] = {}
        self._behind_seconds = 0.0
        self._ranks_on: dict[str, list[int]] = defaultdict(list)
        for rank, node in generation.nodes.items():
            self._ranks_on[node].append(rank)

    def update(self, seen: Observation) -> list[Finding]:
        pause_ns = int(self.settings.own_pause_seconds * 1e9)
        if self._listening_since_ns is None or seen.now_ns - self._last_tick_ns > pause_ns:
            self._listening_since_ns = seen.now_ns
        passed = (seen.now_ns - self._last_tick_ns) / 1e9
        self._last_tick_ns = seen.now_ns
        nodes = sorted(self._ranks_on)
        silence = {node: self._silent_seconds(node, seen) for node in nodes}
        lease = self.policy.node_lease_seconds
        heard = [node for node in nodes if silence[node] < lease]
        # Who was so far behind needs as long to catch up with everybody.
        self._behind_seconds = max(self._behind_seconds - passed, self._late_seconds(heard, seen))
        lease += self._behind_seconds
        newest_ns = max((seen.last_seen_ns.get(node, 0) for node in nodes), default=0)
        if len(nodes) > 1 and (seen.now_ns - newest_ns) / 1e9 >= lease:
            self._listening_since_ns = seen.now_ns  # once one is heard the others have time, too
            return []
        findings = []
        for node, seconds in silence.items():
            if seconds >= lease and node not in self._lost:
                self._lost[node] = self._finding(node, seconds, seen)
                findings.append(self._lost[node])
        # Its ranks may have died with the silence: that a node is heard again clears nothing.
        return findings

    def _late_seconds(self, heard: list[str], seen: Observation) -> float:
        """What nearly all news stays below; more than a minute is a clock that was set back."""
        late = sorted(seen.lateness_ns.get(node, 0) / 1e9 for node in heard)
        late = [seconds for seconds in late if seconds < self.settings.most_lateness_seconds]
        return late[int(_NEARLY_ALL * (len(late) - 1))] if late else 0.0

    def _silent_seconds(self, node: str, seen: Observation) -> float:
        since_ns = max(seen.last_seen_ns.get(node, 0), self._listening_since_ns or 0)
        return (seen.now_ns - since_ns) / 1e9

    def _finding(self, node: str, seconds: float, seen: Observation) -> Finding:
        ranks = sorted(self._ranks_on[node])
        named = ", ".join(map(str, ranks))
        evidence = [
            Evidence(
                f"no word from {node} for {seconds:.1f} s",
                "silent_seconds",
                seconds,
                self.policy.node_lease_seconds,
            )
        ]
        ended = sorted(rank for rank in seen.exited if rank not in ranks)
        if ended:
            evidence.append(Evidence(f"ranks {', '.join(map(str, ended))} ended meanwhile"))
        return self.finding(
            f"failure:node:{node}",
            cause="node lost",
            summary=f"Node {node} is lost with ranks {named}: silent for {seconds:.0f} s.",
            now_ns=seen.now_ns,
            rank=ranks[0] if len(ranks) == 1 else None,
            node=node,
            stage=None,
            suspects_node=True,
            can_checkpoint=False,
            evidence=evidence,
        )
