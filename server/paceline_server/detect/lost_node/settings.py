"""Thresholds of the lost node detector. `Policy.node_lease_seconds` says how long is silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostNodeSettings:
    """When silence is the server's own fault."""

    # A batch that is later than this is no backlog of the server: a clock was set back, or a
    # spool is being emptied.
    most_lateness_seconds: float = 60.0
    # After a longer pause between two ticks the server itself did not listen: silence is measured
    # from then on.
    own_pause_seconds: float = 2.0


DEFAULTS = LostNodeSettings()
