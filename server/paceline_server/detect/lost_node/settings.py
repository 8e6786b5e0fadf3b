"""Thresholds of the lost node detector. `Policy.node_lease_seconds` is the limit of silence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LostNodeSettings:
    """Thresholds: when silence is due to the server itself."""

    # A batch that is later than this is not due to the server's backlog: a clock was set back, or a
    # spool is being sent.
    most_lateness_seconds: float = 60.0
    # After a longer pause between two ticks, during which the server received nothing, silence is
    # measured from then on. While nothing arrives from any node for longer, silence does not grow.
    own_pause_seconds: float = 2.0
    # After this share of the lease, the ranks of other nodes are searched for signs that those of
    # the node still work.
    quiet_leases: float = 0.3
    # Once there was a sign, the next one may take so many median steps.
    steps_of_sign: float = 2.0
    # If all of several nodes are silent, while other nodes respond, they are lost after so many
    # leases: the network between may be down, and the job go on. So is a node that is alone.
    leases_of_all: float = 12.0


DEFAULTS = LostNodeSettings()
