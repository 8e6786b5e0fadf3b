"""One row per capability of the agent, and the table of rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec

YES, PARTLY, NO = "yes", "partly", "no"
_EVIDENCE_COLUMNS = 58  # characters
_REMEDY_COLUMNS = 52


class CheckRow(msgspec.Struct, frozen=True, omit_defaults=False):
    """One capability; `remedy`: how to enable what is missing; `needed`: the agent requires it."""

    what: str
    seen: str
    evidence: str
    remedy: str = ""
    needed: bool = False


def status(rows: Sequence[CheckRow]) -> int:
    """Return 1 if a required capability is missing, else 0."""
    return int(any(row.needed and row.seen == NO for row in rows))


def as_json(rows: Sequence[CheckRow]) -> str:
    report = {"ok": not status(rows), "checks": rows}
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def as_table(rows: Sequence[CheckRow]) -> str:
    cells = [("WHAT", "SEEN", "EVIDENCE", "TO ENABLE"), *map(_cells, rows)]
    widths = [max(len(row[0]) for row in cells), 6, _EVIDENCE_COLUMNS]
    lines: list[str] = []
    for what, seen, evidence, remedy in cells:
        left = textwrap.wrap(evidence, _EVIDENCE_COLUMNS) or [""]
        right = textwrap.wrap(remedy, _REMEDY_COLUMNS) or [""]
        for index in range(max(len(left), len(right))):
            first = (what, seen) if index == 0 else ("", "")
            parts = [*first, _at(left, index)]
            padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
            lines.append("  ".join([*padded, _at(right, index)]).rstrip())
    return "\n".join(lines)


def _cells(row: CheckRow) -> tuple[str, str, str, str]:
    needed = " (the agent needs this)" if row.needed and row.seen == NO else ""
    return row.what, row.seen, row.evidence + needed, row.remedy


def _at(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else ""
