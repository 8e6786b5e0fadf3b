"""Sequence numbers that are equal at both ends of a communication, per process group and peer.

A channel numbers each communication and keeps its `entered` and `left` counts on the state page.
They show the server which rank has not arrived, even if a rank is dead or hung. Process groups are
identified by object and never kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

from paceline.environment import AXES
from paceline.recorder import Recorder
from paceline.writer import Channel
from paceline_wire.ring import (
    GROUP_WORDS,
    GROUPS,
    PEER_WORDS,
    PEERS,
    STATE_GROUPS,
    STATE_PEERS,
    GroupDefinition,
)
from paceline_wire.spans import NONE_16, NONE_32


class Channels:
    """The channels of one ring, each defined at its first use. The default group has id 0."""

    def __init__(self, recorder: Recorder, c10d: Any) -> None:
        self._recorder = recorder
        self._c10d = c10d
        self.on_new_group: Callable[[Any], None] | None = None  # called with each
        self.by_group: dict[int, Channel] = {}  # by id() of the process group, which may be gone
        self._names: dict[int, tuple[weakref.ref[Any], str, str | None]] = {}
        self._peers: dict[tuple[int, bool], Channel] = {}
        self._slots: dict[int, int] = {}  # by peer: index of its slot on the state page
        self._next_identifier = 1
        self._non_member = c10d.GroupMember.NON_GROUP_MEMBER
        self._scratch = memoryview(bytearray(64)).cast("Q")

    def group(self, process_group: Any | None) -> Channel | None:
        """Return the channel of a process group; None if this rank is not a member."""
        if process_group is None:
            process_group = self._c10d.GroupMember.WORLD
        channel = self.by_group.get(id(process_group))
        if _is_channel_of(channel, process_group):
            return channel
        if process_group is None or process_group is self._non_member:
            return None
        return self._new_group(process_group)

    def name(self, process_group: Any | None, name: str, axis: str | None) -> None:
        """Set the name and axis under which a process group is recorded."""
        if process_group is None:
            process_group = self._c10d._get_default_group()
        if process_group is self._non_member:
            return
        self._names[id(process_group)] = (weakref.ref(process_group), name, axis)
        channel = self.by_group.get(id(process_group))
        if _is_channel_of(channel, process_group):
            self._define(channel.group, process_group)

    def has_name(self, process_group: Any) -> bool:
        """Return whether the group was given a name, by the script or by its mesh."""
        description = str(getattr(process_group, "group_desc", "") or "")
        return id(process_group) in self._names or description.startswith("mesh_")

    def peer(self, rank: int, receives: bool) -> Channel:
        """Return the channel of transfers from (`receives`) or to a global rank."""
        channel = self._peers.get((rank, receives))
        if channel is None:
            channel = self._peers[rank, receives] = self._new_peer(rank, receives)
        return channel

    def global_rank(self, process_group: Any, in_group: int | None) -> int:
        """Return the global rank of a transfer's peer; NONE_32 for a receive from any rank."""
        if in_group is None:
            return NONE_32
        return int(self._c10d.get_global_rank(process_group, in_group))

    def _new_group(self, process_group: Any) -> Channel:
        default = process_group is self._c10d._get_default_group()
        if default and not any(group.group == 0 for group in self.by_group.values()):
            identifier = 0
        else:
            identifier = min(self._next_identifier, NONE_16)
            self._next_identifier += 1
        words, base = self._recorder.state, STATE_GROUPS + identifier * GROUP_WORDS
        if identifier >= GROUPS:
            words, base = self._scratch, 0
        reference = weakref.ref(process_group)
        channel = Channel(words, base, base + 1, base + 2, base + 3, identifier, reference)
        self.by_group[id(process_group)] = channel
        self._define(identifier, process_group)
        if self.on_new_group is not None:
            self.on_new_group(process_group)
        return channel

    def _define(self, identifier: int, process_group: Any) -> None:
        given = self._names.get(id(process_group))
        if given is not None and given[0]() is process_group:
            _, name, axis = given
        else:
            name, axis = self._default_name(identifier, process_group)
        ranks = [int(rank) for rank in self._c10d.get_process_group_ranks(process_group)]
        self._recorder.define(GroupDefinition(identifier, name, ranks, axis))

    def _default_name(self, identifier: int, process_group: Any) -> tuple[str, str | None]:
        """Return name and axis; `init_device_mesh` describes a group as "mesh_" + dimension."""
        if identifier == 0:
            return "world", "world"
        description = str(getattr(process_group, "group_desc", "") or "")
        axis = AXES.get(description.removeprefix("mesh_"))
        if description and description != "undefined":
            return description, axis
        return str(process_group.group_name), None

    def _new_peer(self, rank: int, receives: bool) -> Channel:
        slot = self._slots.setdefault(rank, len(self._slots))
        if rank == NONE_32 or slot >= PEERS:
            return Channel(self._scratch, 0, 1, 2, 3)
        base = STATE_PEERS + slot * PEER_WORDS
        state = self._recorder.state
        state[base] = rank + 1
        entered = base + (3 if receives else 1)
        return Channel(state, entered, entered + 1, base + 5, base + 5)


def _is_channel_of(channel: Channel | None, process_group: Any) -> TypeGuard[Channel]:
    """Return whether it is this group's channel; a new group may reuse an old group's id()."""
    if channel is None or channel.reference is None:
        return False
    return channel.reference() is process_group
