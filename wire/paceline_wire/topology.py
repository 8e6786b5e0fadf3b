"""The position of a rank in a 3D-parallel (data x pipeline x tensor) job."""

from __future__ import annotations

import msgspec

RANKS_AT_MOST = 1 << 17  # per job; an order of magnitude beyond the largest known


class Coordinates(msgspec.Struct, frozen=True, order=True):
    """The position of one rank on each parallel axis, from 0."""

    dp_rank: int = 0
    pp_rank: int = 0  # the pipeline stage
    tp_rank: int = 0


class Topology(msgspec.Struct, frozen=True):
    """Sizes of the parallel axes.

    Global ranks are laid out as Megatron does: tensor innermost, then data, then pipeline:
    ``rank = (pp_rank * dp + dp_rank) * tp + tp_rank``.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} must be at least 1, got {getattr(self, axis)}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return a rank's coordinates. Raises ValueError if it is not in 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinates(dp_rank, pp_rank, tp_rank)

    def rank(self, dp_rank: int, pp_rank: int, tp_rank: int) -> int:
        """Return the global rank at these coordinates."""
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def shrink(self, slots: int) -> Topology | None:
        """Return the largest topology with the same tp and pp that fits `slots` ranks, or None."""
        dp = min(self.dp, slots // (self.tp * self.pp))
        return Topology(dp, self.pp, self.tp) if dp else None
