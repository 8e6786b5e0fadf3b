"""The topology of a generation, from the coordinates that its ranks report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline_wire.ring import Identity, RankDescription
from paceline_wire.topology import DEFAULT_LAYOUT, Coordinates, Topology


class _Report(NamedTuple):
    sizes: Topology
    place: Coordinates
    source: str | None  # None: from the identity, as the script or its launcher gave it


class ReportedTopology:
    """Collects what each rank reports; a topology counts once all ranks report the same one."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reports: dict[int, _Report] = {}
        self._has_changed = False
        self.source: str | None = None  # source of the topology last returned

    def add_identity(self, identity: Identity) -> None:
        """Add what a rank reported when it began; what it reported later takes precedence."""
        known = self._reports.get(identity.rank)
        if known is None or known.source is None:
            report = _Report(identity.topology, identity.coordinates, None)
            self._add(identity.rank, report)

    def add_description(self, rank: int, description: RankDescription) -> None:
        """Add what a rank reported later."""
        sizes, place = description.topology, description.coordinates
        if sizes is not None and place is not None:
            self._add(rank, _Report(sizes, place, description.source))

    def _add(self, rank: int, report: _Report) -> None:
        if 0 <= rank < self._world_size and self._reports.get(rank) != report:
            self._reports[rank] = report
            self._has_changed = True

    def take(self) -> Topology | None:
        """Return the topology if the reports since the last call completed one."""
        if not self._has_changed or len(self._reports) < self._world_size:
            return None
        self._has_changed = False
        reports = self._reports.values()
        if len({(report.sizes, report.source) for report in reports}) > 1:
            return None  # some ranks have reported something new, the others have not yet
        self.source = next(iter(reports)).source
        places = {rank: report.place for rank, report in self._reports.items()}
        return topology_of(next(iter(reports)).sizes, places)


def topology_of(sizes: Topology, places: Mapping[int, Coordinates]) -> Topology | None:
    """Return a topology with these coordinates of all ranks; None if no sizes fit them.

    The coordinates count: sizes that do not fit them are derived from them.
    """
    arranged = sizes.arranged(places)
    if arranged is not None:
        return arranged
    dp, pp, tp, cp, ep = (
        1 + max(max(place.on(axis) for place in places.values()), 0)
        for axis in ("dp", "pp", "tp", "cp", "ep")
    )
    return Topology(dp, pp, tp, cp, ep).arranged(places)


def may_replace(current: Topology, reported: Topology) -> bool:
    """Return whether a reported topology may replace one that a person asked for.

    A request of plain data parallelism only gives the number of ranks.
    """
    if current.world_size != reported.world_size:
        return False
    is_plain = current.dp == current.world_size
    return is_plain or all(current.size(axis) == reported.size(axis) for axis in DEFAULT_LAYOUT)
