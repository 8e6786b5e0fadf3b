"""Process groups of the job: map each rank's local ids to one key per group."""

from __future__ import annotations

import numpy as np

from paceline_server.steps.columns import Ints
from paceline_wire.ring import GroupDefinition

# Limits the memory for a trainer that creates groups repeatedly.
MAXIMUM_GROUPS_PER_RANK = 4096
UNKNOWN = -1
_ID_BITS = 16


class Groups:
    """The groups of a job. Keys count from 0; key 0 is the default group of all ranks.

    Many groups have the same name (one "tp" group per tensor-parallel pair), so a group is
    identified by its name and its members.
    """

    def __init__(self, world_size: int) -> None:
        all_ranks = tuple(range(world_size))
        self._all_ranks = all_ranks
        self._keys: dict[tuple[str, tuple[int, ...]], int] = {("world", all_ranks): 0}
        self._names = ["world"]
        self._members = [all_ranks]
        self._local: dict[int, dict[int, int]] = {}
        self._sorted: Ints | None = None  # (rank and local id, key), cached for `keys`

    def add(self, rank: int, definition: GroupDefinition) -> None:
        local = self._local.setdefault(rank, {0: 0})
        if len(local) >= MAXIMUM_GROUPS_PER_RANK or not 0 <= definition.id < 1 << _ID_BITS:
            return
        members = tuple(sorted(set(definition.ranks)))
        named = (_name(definition, members), members)
        # A rank that has not defined the default group uses id 0 for it: same members, same key.
        key = 0 if definition.axis == "world" and members == self._all_ranks else None
        if key is None:
            key = self._keys.setdefault(named, len(self._names))
        if key == len(self._names):
            self._names.append(named[0])
            self._members.append(members)
        local[definition.id] = key
        self._sorted = None

    def key(self, rank: int, local_id: int) -> int | None:
        """Return the key; None: the rank has not defined the group."""
        return self._local.get(rank, {0: 0}).get(local_id)

    def keys(self, ranks: Ints, local_ids: Ints) -> Ints:
        """Vectorized `key`; UNKNOWN where undefined."""
        if self._sorted is None:
            pairs = [
                (rank << _ID_BITS | local_id, key)
                for rank, local in self._local.items()
                for local_id, key in local.items()
            ]
            self._sorted = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T.copy()
        names, keys = self._sorted
        default = np.where(local_ids == 0, 0, UNKNOWN)
        if not names.size:
            return default
        wanted = ranks << _ID_BITS | local_ids
        place = np.minimum(np.searchsorted(names, wanted), names.size - 1)
        found: Ints = np.where(names[place] == wanted, keys[place], default)
        return found

    def name(self, rank: int, local_id: int) -> str | None:
        key = self.key(rank, local_id)
        return None if key is None else self._names[key]

    def name_of(self, key: int) -> str:
        return self._names[key]

    def members(self, key: int) -> tuple[int, ...]:
        return self._members[key]


def _name(definition: GroupDefinition, members: tuple[int, ...]) -> str:
    """Return the name; for a group that torch only numbered, its ranks."""
    if not definition.name.isdecimal() or not members:
        return definition.name
    first, last = members[0], members[-1]
    if last - first + 1 == len(members):
        return f"ranks {first}-{last}" if len(members) > 1 else f"rank {first}"
    listed = ", ".join(map(str, members[:4]))
    return f"ranks {listed}" if len(members) <= 4 else f"ranks {listed}, ..., {last}"
