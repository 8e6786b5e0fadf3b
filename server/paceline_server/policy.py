"""What an operator may want to change: when Paceline reports, when it acts, and how often.

Every value is defined here once, with its default and the reason for it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["observe", "dry-run", "approve", "auto"]

START_TIMEOUT_SECONDS = 900.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """When to act by ourselves. Every default states its reason where it is set."""

    mode: Mode = "auto"
    restarts_per_hour: int = 10
    restarts_per_day: int = 50
    backoff_seconds: float = 1.0  # doubled after each restart without progress
    backoff_maximum_seconds: float = 300.0
    cycles_without_progress: int = 3
    quarantine_share: float = 0.34  # at most this share of the nodes
    node_lease_seconds: float = 5.0  # silent for longer: the node counts as lost
    # A restart costs more than to wait for a link that flaps or storage that hiccups.
    hang_patience_seconds: float = 10.0
    checkpoint_timeout_seconds: float = 60.0
    stop_timeout_seconds: float = 15.0
    # For the first step of all ranks: a large job loads its checkpoint, compiles and sets up NCCL
    # for minutes. A rank that ends meanwhile is seen at once.
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
