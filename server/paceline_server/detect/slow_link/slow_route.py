"""The route to report when transfers become slow: a link, a node's network or a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_server.detect.observation import Generation
from paceline_server.detect.slow_link.traffic import TransferLane
from paceline_wire.spans import op_name


@dataclass(frozen=True, slots=True)
class SlowRoute:
    """Slow lanes (positions) and their ranks. One of `link`, `node`, `op` and `nodes` names the
    route."""

    lanes: tuple[int, ...]
    ranks: tuple[int, ...]
    link: tuple[int, int] | None = None
    node: str | None = None
    op: int | None = None  # the operation, for a process group's collective
    nodes: tuple[str, ...] = ()  # all traffic between them

    @property
    def fingerprint(self) -> str:
        if self.link is not None:
            return f"slow_link:{self.link[0]}-{self.link[1]}"
        if self.node is not None:
            return f"slow_link:{self.node}"
        if self.nodes:
            return f"slow_link:between:{'-'.join(self.nodes[:4])}"
        return f"slow_link:{op_name(self.op or 0)}:{'-'.join(map(str, self.ranks[:4]))}"

    def subject(self, generation: Generation) -> str:
        """Return the subject of a sentence."""
        if self.link is not None:
            source, destination = map(generation.rank_text, self.link)
            return f"The link between {source} and {destination}"
        if self.node is not None:
            return f"The network of {self.node}"
        if len(self.nodes) == 2:
            return f"The network between {self.nodes[0]} and {self.nodes[1]}"
        if self.nodes:
            return f"The network between the {len(self.nodes)} nodes"
        return f"The {op_name(self.op or 0)} of ranks {', '.join(map(str, self.ranks[:16]))}"


def name_route(
    slow: Sequence[int], lanes: Sequence[TransferLane], surest: int, generation: Generation
) -> SlowRoute:
    """Return the route that the lanes that became slow together share.

    Args:
        slow: positions of the slow lanes; `surest` is the position of the most certain one.

    Slow lanes within one node are left out: a faulty port slows every group that crosses the
    network, and no other.
    """
    best = lanes[surest]
    if best.pair is None and best.op is None:
        return SlowRoute((surest,), best.ranks, nodes=tuple(sorted(_nodes(best, generation))))
    together = [lane for lane in slow if len(_nodes(lanes[lane], generation)) > 1]
    if len(together) > 1 and surest in together:
        shared = set.intersection(*(_nodes(lanes[lane], generation) for lane in together))
        healthy = _healthy_nodes(together, lanes, generation)
        suspects = sorted(shared - healthy) or sorted(shared)
        if len(suspects) == 1:
            ranks = sorted(
                rank
                for rank in {rank for lane in together for rank in lanes[lane].ranks}
                if generation.node(rank) == suspects[0]
            )
            return SlowRoute(tuple(together), tuple(ranks), node=suspects[0])
    if best.pair is not None:
        same = tuple(lane for lane in slow if set(lanes[lane].ranks) == set(best.ranks))
        return SlowRoute(same or (surest,), best.ranks, link=best.pair)
    return SlowRoute((surest,), best.ranks, op=best.op)


def crossing(lanes: Sequence[TransferLane], generation: Generation) -> list[int]:
    """Return the positions of the lanes between nodes."""
    return [place for place, lane in enumerate(lanes) if len(_nodes(lane, generation)) > 1]


def _nodes(lane: TransferLane, generation: Generation) -> set[str]:
    return {node for rank in lane.ranks if (node := generation.node(rank)) is not None}


def _healthy_nodes(
    slow: Sequence[int], lanes: Sequence[TransferLane], generation: Generation
) -> set[str]:
    """Return the nodes of lanes of the same kinds that cross the network and are not slow."""
    kinds = {(lanes[position].op, lanes[position].pair is None) for position in slow}
    slow_positions = set(slow)
    return {
        node
        for position, lane in enumerate(lanes)
        if position not in slow_positions and (lane.op, lane.pair is None) in kinds
        if len(nodes := _nodes(lane, generation)) > 1
        for node in nodes
    }
