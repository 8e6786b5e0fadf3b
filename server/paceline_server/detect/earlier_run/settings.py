"""Thresholds of the earlier run detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EarlierRunSettings:
    """When a rank of an earlier run counts as running beside the current one."""

    # After the current run was found: a launcher ends the ranks of the earlier one before it starts
    # the next, but reports of that may be late.
    grace_seconds: float = 10.0
    # Agents report the state of each rank at least every 2.5 s.
    gone_after_seconds: float = 10.0


DEFAULTS = EarlierRunSettings()
