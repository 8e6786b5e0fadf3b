"""Final components of a directed graph: strongly connected and without outgoing edges.

Tarjan, "Depth-first search and linear graph algorithms" (1972), without recursion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def final_components(edges: Mapping[int, Sequence[int]]) -> list[frozenset[int]]:
    """Return the components without outgoing edges; a node without edges is one of them."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    open_nodes: list[int] = []
    component_of: dict[int, int] = {}
    components: list[frozenset[int]] = []
    for root in edges:
        if root in index:
            continue
        path = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        open_nodes.append(root)
        while path:
            node, successors = path[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    open_nodes.append(successor)
                    path.append((successor, iter(edges.get(successor, ()))))
                    break
                if successor not in component_of:
                    low[node] = min(low[node], index[successor])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    members = frozenset(_pop_until(open_nodes, node))
                    component_of.update(dict.fromkeys(members, len(components)))
                    components.append(members)
    return [
        members
        for number, members in enumerate(components)
        if all(component_of[s] == number for node in members for s in edges.get(node, ()))
    ]


def _pop_until(nodes: list[int], last: int) -> Iterator[int]:
    while (node := nodes.pop()) != last:
        yield node
    yield last
