"""Signs that the ranks of a silent node still work: others communicate with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from paceline_server.detect.observation import Generation, Observation
from paceline_wire.spans import Op

# A rank can finish these before its peers take part.
_ONE_WAY = {Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER}

# (rank, group or None, peer or None)
_Channel = tuple[int, int | None, int | None]


class SignsOfLife:
    """Notes when a rank of a responding node last finished something with a rank of a silent node.

    Counted are collectives that need all members, and transfers received from the silent node. What
    a node sent before its end may be received after it, so that the sign can be late by as much
    as is buffered.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._finished: dict[_Channel, int] = {}
        self._looked_ns = 0
        self._alive_ns: dict[str, int] = {}

    def update(self, quiet: Set[str], observation: Observation) -> None:
        """Compare the state pages of the other nodes with those of the previous call."""
        # A time after now is from before the clock was set back.
        now_ns = observation.now_ns
        self._alive_ns = {node: min(ns, now_ns) for node, ns in self._alive_ns.items()}
        if not quiet:
            self._finished.clear()
            return
        finished = dict(self._channels(quiet, observation))
        advanced = [
            channel
            for channel, count in finished.items()
            if count > self._finished.get(channel, count)
        ]
        for node in self._partners(advanced, observation) & quiet:
            # Any time since the previous call: the earliest.
            self._alive_ns[node] = self._looked_ns
        self._finished, self._looked_ns = finished, observation.now_ns

    def age_seconds(self, node: str, now_ns: int) -> float:
        """Return the time since the newest sign; infinite without one."""
        since_ns = self._alive_ns.get(node)
        return math.inf if since_ns is None else (now_ns - since_ns) / 1e9

    def _channels(
        self, quiet: Set[str], observation: Observation
    ) -> Iterator[tuple[_Channel, int]]:
        for rank, live in observation.ranks.items():
            if live.state is None or self._generation.nodes.get(rank) in quiet:
                continue
            for group in live.state.view.groups:
                if group.op not in _ONE_WAY:
                    yield (rank, group.group, None), group.left
            for peer in live.state.view.peers:
                yield (rank, None, peer.peer), peer.recv_left

    def _partners(self, channels: list[_Channel], observation: Observation) -> set[str]:
        keys = {
            observation.groups.key(rank, group) for rank, group, _ in channels if group is not None
        }
        ranks = {peer for *_, peer in channels if peer is not None}
        for key in keys:
            if key is not None:
                ranks.update(observation.groups.members(key))
        nodes = self._generation.nodes
        return {nodes[rank] for rank in ranks if rank in nodes}
