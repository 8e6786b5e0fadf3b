"""Process groups as all their members know them: local definition ids -> one key per group."""

from __future__ import annotations

import numpy as np

from paceline_server.steps.columns import Ints
from paceline_wire.ring import GroupDefinition

# A trainer that makes groups without end must not fill the server's memory.
MAXIMUM_GROUPS_PER_RANK = 4096
UNKNOWN = -1
_ID_BITS = 16


class Groups:
    """Group keys count from 0; key 0 is the default group of all ranks.

    Groups of one name exist many times over (one "tp" group per tensor-parallel pair), so a group
    is identified by its name together with its members.
    """

    def __init__(self, world_size: int) -> None:
        everyone = tuple(range(world_size))
        self._everyone = everyone
        self._keys: dict[tuple[str, tuple[int, ...]], int] = {("world", everyone): 0}
        self._names = ["world"]
        self._members = [everyone]
        self._local: dict[int, dict[int, int]] = {}
        self._sorted: Ints | None = None  # (rank and local id, key), when it was last asked for

    def add(self, rank: int, definition: GroupDefinition) -> None:
        local = self._local.setdefault(rank, {0: 0})
        if len(local) >= MAXIMUM_GROUPS_PER_RANK or not 0 <= definition.id < 1 << _ID_BITS:
            return
        members = tuple(sorted(set(definition.ranks)))
        named = (definition.name, members)
        # The default group is known as id 0 to a rank that never named it: same members, same key.
        key = 0 if definition.axis == "world" and members == self._everyone else None
        if key is None:
            key = self._keys.setdefault(named, len(self._names))
        if key == len(self._names):
            self._names.append(definition.name)
            self._members.append(members)
        local[definition.id] = key
        self._sorted = None

    def key(self, rank: int, local_id: int) -> int | None:
        """None: the rank never defined it."""
        return self._local.get(rank, {0: 0}).get(local_id)

    def keys(self, ranks: Ints, local_ids: Ints) -> Ints:
        """Vectorised `key`; UNKNOWN where undefined."""
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
