"""Output of the checks: worst first as text, all of them as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from paceline_cli.preflight.facts import NodeFacts
from paceline_cli.preflight.plan import Result
from paceline_cli.preflight.verdict import Check

_ORDER = ("fail", "warn", "skip", "pass")
_COLOURS = {"fail": "red", "warn": "yellow", "skip": "bright_black", "pass": "green"}
SCHEMA = 1


def verdict(checks: Sequence[Check]) -> str:
    found = {check.status for check in checks}
    return next((status for status in ("fail", "warn") if status in found), "pass")


def as_json(
    checks: Sequence[Check], nodes: Sequence[NodeFacts], measured: Sequence[Result]
) -> dict[str, Any]:
    summary = {
        "schema": SCHEMA,
        "verdict": verdict(checks),
        "counts": counts(checks),
        "checks": checks,
        "nodes": nodes,
        "measurements": measured,
    }
    plain: dict[str, Any] = msgspec.to_builtins(summary)
    return plain


def counts(checks: Sequence[Check]) -> dict[str, int]:
    return {status: sum(check.status == status for check in checks) for status in _ORDER}


def as_text(checks: Sequence[Check], nodes: int) -> str:
    """Return the report as colored text."""
    lines = []
    width = max((len(check.name) for check in checks), default=0)
    for check in sorted(checks, key=lambda check: _ORDER.index(check.status)):
        status = click.style(f"{check.status:4}", fg=_COLOURS[check.status], bold=True)
        lines.append(f"{status}  {check.name:{width}}  {check.evidence}")
        if check.fix is not None:
            lines.append(f"{'':4}  {'':{width}}  -> {check.fix}")
    number = counts(checks)
    summary = ", ".join(f"{number[status]} {status}" for status in _ORDER if number[status])
    lines.append(f"{nodes} node{'' if nodes == 1 else 's'}: {summary}")
    return "\n".join(lines)
