"""Detect nodes whose agent no longer sends anything."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import FAILURE, Kind
from paceline_server.detect.lost_node.settings import DEFAULTS, LostNodeSettings
from paceline_server.detect.lost_node.signs_of_life import SignsOfLife
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_server.policy import Policy

_LATENESS_QUANTILE = 0.9


class LostNodeDetector(Detector):
    """Finding kind `failure`, cause `node lost`, fingerprint `failure:node:AGENT`.

    Silence counts only while the server itself was receiving: after a pause of the server, every
    node looks silent, and so does each while the server receives from no node at all. If all of
    several nodes are silent at once, the network is more likely to be down than all of them, so
    that they are lost only after a longer time in which other nodes of the fleet respond; without
    such nodes nothing is reported. If no other node responds, the only node of a job, whose host
    may be overloaded together with the server's, is lost after that time: no other could take over.
    If batches of other nodes arrive late, because the server was stopped, is overloaded or rejects
    what it cannot store, the lease is extended by that delay. A node whose ranks still take part in
    the collectives and transfers of other nodes is not lost: only its agent is away.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (FAILURE,)
    order: ClassVar[int] = 30

    def __init__(
        self, generation: Generation, policy: Policy, settings: LostNodeSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._silent_since_ns: dict[str, int] = {}  # later than the last batch by pauses since
        self._last_tick_ns = 0
        self._resumed_ns = 0  # the end of the last pause of this server
        self._newest_ns = 0  # when the newest batch of any node was received, by its receiver
        self._arrived_ns = 0  # ... and seen here
        self._witnessed_since_ns: int | None = None  # other nodes respond
        self._lost: dict[str, Finding] = {}
        self._delay_seconds = 0.0
        self._signs = SignsOfLife(generation)
        self._ranks_on: dict[str, list[int]] = defaultdict(list)
        for rank, node in generation.nodes.items():
            self._ranks_on[node].append(rank)

    def update(self, observation: Observation) -> list[Finding]:
        pause_ns = int(self.settings.own_pause_seconds * 1e9)
        elapsed_ns = observation.now_ns - self._last_tick_ns  # negative: the clock was set back
        nodes = sorted(self._ranks_on)
        self._watch_arrivals(observation)
        if not self._silent_since_ns or not 0 <= elapsed_ns <= pause_ns:
            self._silent_since_ns = dict.fromkeys(nodes, observation.now_ns)
            self._resumed_ns = self._arrived_ns = observation.now_ns
            self._witnessed_since_ns = None
        elif observation.now_ns - self._arrived_ns > pause_ns:
            for node in nodes:
                self._silent_since_ns[node] += elapsed_ns
        self._watch_others(observation)
        elapsed = max(elapsed_ns, 0) / 1e9
        self._last_tick_ns = observation.now_ns
        lease = self.policy.node_lease_seconds
        silence = {node: self._silent_seconds(node, observation) for node in nodes}
        least = lease * self.settings.quiet_leases
        quiet = {node for node in nodes if silence[node] >= least and node not in self._lost}
        self._signs.update(quiet, observation)
        responding = [node for node in nodes if silence[node] < lease]
        # If batches are late by this much, any node's batch may take as long to arrive.
        self._delay_seconds = max(
            self._delay_seconds - elapsed, self._lateness_seconds(responding, observation)
        )
        lease += self._delay_seconds
        newest_ns = max((observation.last_seen_ns.get(node, 0) for node in nodes), default=0)
        all_silent = (observation.now_ns - newest_ns) / 1e9 >= lease
        if all_silent and (len(nodes) > 1 or self._witnessed_since_ns is None):
            seconds = self._all_silent_seconds(newest_ns, observation)
            if seconds < lease * self.settings.leases_of_all:
                # Gives the others a full lease once one responds.
                self._silent_since_ns = dict.fromkeys(nodes, observation.now_ns)
                return []
            silence = dict.fromkeys(nodes, seconds)
        findings = []
        # Ranks that communicate once in each step give a sign as often.
        without_sign = max(lease, self.settings.steps_of_sign * (observation.step_seconds or 0.0))
        for node, seconds in silence.items():
            is_over = self._signs.age_seconds(node, observation.now_ns) >= without_sign
            if seconds >= lease and is_over and node not in self._lost:
                self._lost[node] = self._failure(node, seconds, observation)
                findings.append(self._lost[node])
        # Not cleared if the node responds again: its ranks may have died meanwhile.
        return findings

    def _watch_arrivals(self, observation: Observation) -> None:
        """Note when something arrived. Several servers may receive, each with its own clock."""
        newest_ns = max([*observation.last_seen_ns.values(), observation.others_seen_ns])
        if newest_ns != self._newest_ns:
            self._newest_ns, self._arrived_ns = newest_ns, observation.now_ns

    def _watch_others(self, observation: Observation) -> None:
        """Note since when the server has received from other nodes without a pause."""
        others_silent_ns = observation.now_ns - observation.others_seen_ns
        if others_silent_ns >= self.policy.node_lease_seconds * 1e9:
            self._witnessed_since_ns = None
        elif self._witnessed_since_ns is None:
            self._witnessed_since_ns = observation.now_ns

    def _all_silent_seconds(self, newest_ns: int, observation: Observation) -> float:
        """Return for how long other nodes have responded and none of the job; 0: none does.

        The only node of a job needs no other that responds.
        """
        since_ns = self._witnessed_since_ns
        if since_ns is None and len(self._ranks_on) > 1:
            return 0.0
        return (observation.now_ns - max(newest_ns, since_ns or self._resumed_ns)) / 1e9

    def _lateness_seconds(self, responding: list[str], observation: Observation) -> float:
        """Return the 90th percentile of lateness, without values caused by clock changes."""
        lateness = sorted(observation.lateness_ns.get(node, 0) / 1e9 for node in responding)
        lateness = [
            seconds for seconds in lateness if seconds < self.settings.most_lateness_seconds
        ]
        return lateness[int(_LATENESS_QUANTILE * (len(lateness) - 1))] if lateness else 0.0

    def _silent_seconds(self, node: str, observation: Observation) -> float:
        since_ns = max(observation.last_seen_ns.get(node, 0), self._silent_since_ns[node])
        self._silent_since_ns[node] = since_ns
        return (observation.now_ns - since_ns) / 1e9

    def _failure(self, node: str, seconds: float, observation: Observation) -> Finding:
        ranks = sorted(self._ranks_on[node])
        evidence = [
            Evidence(
                f"nothing received from {node} for {seconds:.1f} s",
                "silent_seconds",
                seconds,
                self.policy.node_lease_seconds,
            )
        ]
        age = self._signs.age_seconds(node, observation.now_ns)
        if age < seconds:
            evidence.append(
                Evidence(f"other ranks communicated with its ranks until {age:.1f} s ago")
            )
        ended = sorted(rank for rank in observation.exited if rank not in ranks)
        if ended:
            evidence.append(Evidence(f"{ranks_text(ended)} ended meanwhile"))
        return self.finding(
            f"failure:node:{node}",
            cause="node lost",
            summary=f"Node {node} with {ranks_text(ranks)} is lost: silent for {seconds:.0f} s.",
            now_ns=observation.now_ns,
            rank=ranks[0] if len(ranks) == 1 else None,
            node=node,
            stage=None,
            suspects_node=True,
            can_checkpoint=False,
            evidence=evidence,
        )
