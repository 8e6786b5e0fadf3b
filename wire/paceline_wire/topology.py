"""The position of a rank on the parallel axes of a job.

Axes: `dp` data, `pp` pipeline, `tp` tensor, `cp` context (sequence) and `ep` expert parallel. How
ranks are numbered over them differs between frameworks, so it is data: `Topology.layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

RANKS_AT_MOST = 1 << 17  # per job; ten times the largest known one

Axis = Literal["dp", "pp", "tp", "cp", "ep"]
# Outermost first: what rows and messages without a layout mean.
DEFAULT_LAYOUT: tuple[Axis, ...] = ("pp", "dp", "ep", "cp", "tp")
_ALL_AXES = frozenset(DEFAULT_LAYOUT)


class Coordinates(msgspec.Struct, frozen=True, order=True):
    """The position of one rank on each parallel axis, from 0."""

    dp_rank: int = 0
    pp_rank: int = 0  # the pipeline stage
    tp_rank: int = 0
    cp_rank: int = 0
    ep_rank: int = 0

    def on(self, axis: Axis) -> int:
        """Return the position on one axis."""
        position: int = getattr(self, f"{axis}_rank")
        return position


class Topology(msgspec.Struct, frozen=True):
    """Sizes of the parallel axes, and how global ranks are numbered over them.

    Expert parallelism divides data parallelism: ranks of one ep group hold different experts and
    process different data, so a job has `dp * ep` replicas of its dense layers.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    # The axes from outermost to innermost: the coordinate on the last one changes from one rank to
    # the next.
    layout: tuple[Axis, ...] = DEFAULT_LAYOUT
    # For ranks that no order of axes describes: by rank, the number that its coordinates would have
    # in `layout`. Empty: the rank itself.
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for axis in DEFAULT_LAYOUT:
            if self.size(axis) < 1:
                raise ValueError(f"{axis} must be at least 1, got {self.size(axis)}")
        if len(self.layout) != len(_ALL_AXES) or set(self.layout) != _ALL_AXES:
            raise ValueError(f"layout must name each axis once, got {', '.join(self.layout)}")
        if self.numbers and (
            len(self.numbers) != self.world_size
            or sorted(self.numbers) != list(range(self.world_size))
        ):
            raise ValueError(f"numbers must be each of 0..{self.world_size - 1} once")

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along one axis."""
        size: int = getattr(self, axis)
        return size

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.tp * self.cp * self.ep

    def text(self) -> str:
        """Return the sizes as people read them: dp2 x pp2 x tp1, and cp and ep if they are used."""
        axes: tuple[Axis, ...] = ("dp", "pp", "tp", "cp", "ep")
        used = [axis for axis in axes if axis in ("dp", "pp", "tp") or self.size(axis) > 1]
        return " x ".join(f"{axis}{self.size(axis)}" for axis in used)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same dense layers and process different data."""
        return self.dp * self.ep

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def stage_leaders(self) -> list[int]:
        """The first rank of each pipeline stage."""
        return [self.rank(0, stage, 0) for stage in range(self.pp)]

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's coordinates. Raises ValueError if it is not in 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        rest = self.numbers[rank] if self.numbers else rank
        found = {}
        for axis in reversed(self.layout):
            rest, found[f"{axis}_rank"] = divmod(rest, self.size(axis))
        return Coordinates(**found)

    def rank(
        self, dp_rank: int, pp_rank: int, tp_rank: int, cp_rank: int = 0, ep_rank: int = 0
    ) -> int:
        """Return the global rank at these coordinates."""
        return self.rank_at(Coordinates(dp_rank, pp_rank, tp_rank, cp_rank, ep_rank))

    def rank_at(self, place: Coordinates) -> int:
        """Return the global rank at these coordinates."""
        number = self._number(place)
        return self.numbers.index(number) if self.numbers else number

    def strides(self) -> dict[Axis, int]:
        """Return by how much a number in `layout` grows per step along each axis."""
        strides, stride = {}, 1
        for axis in reversed(self.layout):
            strides[axis] = stride
            stride *= self.size(axis)
        return strides

    def shrink(self, slots: int) -> Topology | None:
        """Return the largest topology with the same other axes that fits `slots`, or None."""
        dp = min(self.dp, slots // (self.world_size // self.dp))
        if not dp or dp == self.dp:
            return self if dp else None
        return msgspec.structs.replace(self, dp=dp, numbers=())

    def arranged(self, coordinates: Mapping[int, Coordinates]) -> Topology | None:
        """Return these sizes with the layout in which every rank has its given coordinates.

        Args:
            coordinates: of all ranks.

        Returns:
            None if they are not one rank per place of these sizes.
        """
        world_size = self.world_size
        if coordinates.keys() != set(range(world_size)) or not all(
            0 <= place.on(axis) < self.size(axis)
            for place in coordinates.values()
            for axis in DEFAULT_LAYOUT
        ):
            return None
        rank_at = {place: rank for rank, place in coordinates.items()}
        if len(rank_at) != world_size:
            return None
        # In a regular layout the neighbor along a slower axis has a higher rank: sort by its rank.
        used = [axis for axis in DEFAULT_LAYOUT if self.size(axis) > 1]
        used.sort(key=lambda axis: -rank_at[Coordinates(**{f"{axis}_rank": 1})])
        unused = [axis for axis in DEFAULT_LAYOUT if self.size(axis) == 1]
        default = [axis for axis in DEFAULT_LAYOUT if self.size(axis) > 1]
        layout = DEFAULT_LAYOUT if used == default else (*unused, *used)
        regular = msgspec.structs.replace(self, layout=layout, numbers=())
        numbers = tuple(regular._number(coordinates[rank]) for rank in range(world_size))
        if numbers == tuple(range(world_size)):
            return regular
        plain = msgspec.structs.replace(self, layout=DEFAULT_LAYOUT, numbers=())
        numbers = tuple(plain._number(coordinates[rank]) for rank in range(world_size))
        return msgspec.structs.replace(plain, numbers=numbers)

    def _number(self, place: Coordinates) -> int:
        number = 0
        for axis in self.layout:
            number = number * self.size(axis) + place.on(axis)
        return number
