"""The operation a rank is in, as text: `all_reduce tp#118`, `forward_recv from 2 #57`."""

from __future__ import annotations

from collections.abc import Mapping

from paceline_server.steps.groups import Groups
from paceline_wire.ring import Frame
from paceline_wire.spans import RECEIVE_OPS, SECTION_BASE, op_name

Sections = Mapping[tuple[int, int], str]  # (rank, section id) -> name


def operation_text(rank: int, frame: Frame, groups: Groups, sections: Sections) -> str:
    if frame.op >= SECTION_BASE:
        return section_name(rank, frame.op, sections)
    name = op_name(frame.op)
    if not frame.sequence:
        return name
    if frame.peer is not None:
        direction = "from" if frame.op in RECEIVE_OPS else "to"
        return f"{name} {direction} {frame.peer} #{frame.sequence}"
    group = groups.name(rank, frame.group) or f"group {frame.group}"
    return f"{name} {numbered(group, frame.sequence)}"


def numbered(group: str, sequence: int) -> str:
    """Return `tp#118`, or `ranks 0-3 #118`."""
    return f"{group} #{sequence}" if " " in group else f"{group}#{sequence}"


def section_name(rank: int, op: int, sections: Sections) -> str:
    name = sections.get((rank, op - SECTION_BASE))
    return f"section {name}" if name is not None else op_name(op)
