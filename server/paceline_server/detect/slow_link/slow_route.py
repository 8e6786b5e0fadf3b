"""What to name when transfers get slow: a link, the rank or the node all of them share, a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_server.detect.observation import Generation
from paceline_server.detect.slow_link.traffic import TransferLane
from paceline_wire.spans import op_name


@dataclass(frozen=True, slots=True)
class SlowRoute:
    """`lanes`: positions of those that are slow. One of `link`, `node` or `op` says what it is."""

    lanes: tuple[int, ...]
    ranks: tuple[int, ...]
    link: tuple[int, int] | None = None
    node: str | None = None
    op: int | None = None  # of a group

    @property
    def fingerprint(self) -> str:
        if self.link is not None:
            return f"slow_link:{self.link[0]}-{self.link[1]}"
        if self.node is not None:
            return f"slow_link:{self.node}"
        return f"slow_link:{op_name(self.op or 0)}:{'-'.join(map(str, self.ranks[:4]))}"

    def subject(self, generation: Generation) -> str:
        """At the start of a sentence."""
        if self.link is not None:
            one, other = map(generation.rank_text, self.link)
            return f"The link between {one} and {other}"
        if self.node is not None:
            return f"The network of {self.node}"
        return f"The {op_name(self.op or 0)} of ranks {', '.join(map(str, self.ranks[:16]))}"


def name_route(
    slow: Sequence[int], lanes: Sequence[TransferLane], surest: int, generation: Generation
) -> SlowRoute:
    """Intersect the lanes that got slow together: `slow` are their positions, `surest` the worst.

    Lanes that stay within one node and are slow too do not matter to who is shared: every group
    that crosses the network through a bad port is slow, and nothing else is.
    """
    best = lanes[surest]
    together = [place for place in slow if len(_nodes(lanes[place], generation)) > 1]
    if len(together) > 1 and surest in together:
        shared = set.intersection(*(_nodes(lanes[place], generation) for place in together))
        healthy = _healthy_nodes(together, lanes, generation)
        suspects = sorted(shared - healthy) or sorted(shared)
        if len(suspects) == 1:
            ranks = sorted(
                rank
                for rank in {rank for place in together for rank in lanes[place].ranks}
                if generation.node(rank) == suspects[0]
            )
            return SlowRoute(tuple(together), tuple(ranks), node=suspects[0])
    if best.pair is not None:
        same = tuple(place for place in slow if set(lanes[place].ranks) == set(best.ranks))
        return SlowRoute(same or (surest,), best.ranks, link=best.pair)
    return SlowRoute((surest,), best.ranks, op=best.op)


def _nodes(lane: TransferLane, generation: Generation) -> set[str]:
    return {node for rank in lane.ranks if (node := generation.node(rank)) is not None}


def _healthy_nodes(
    slow: Sequence[int], lanes: Sequence[TransferLane], generation: Generation
) -> set[str]:
    """Nodes that other lanes of the same kinds cross the network from, and are not slow."""
    kinds = {(lanes[place].op, lanes[place].pair is None) for place in slow}
    standing = set(slow)
    return {
        node
        for place, lane in enumerate(lanes)
        if place not in standing and (lane.op, lane.pair is None) in kinds
        if len(nodes := _nodes(lane, generation)) > 1
        for node in nodes
    }
