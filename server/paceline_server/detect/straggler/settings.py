"""Thresholds of the straggler detector."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.detect.shared_settings import FALSE_ALARMS_PER_STEP


@dataclass(frozen=True, slots=True)
class StragglerSettings:
    """Thresholds: how long and how clearly a rank must be slow. `Policy` defines how slow."""

    false_alarms_per_step: float = FALSE_ALARMS_PER_STEP
    # Average slowdown from which a rank that is slow in some steps only is reported.
    recurring_slowdown: float = 1.1
    # Total slowdown from which a slow creep is reported. GPUs of one node drift apart by a few
    # percent as the node warms up ...
    creep_slowdown: float = 1.08
    # ... and two nodes that drift in opposite directions by up to a tenth.
    creep_slowdown_of_node: float = 1.2
    # Mild and constant differences between peers come from the model (an extra embedding, the
    # logging rank) and are not faults. From this slowdown on they are reported as advice ...
    chronic_slowdown: float = 1.15
    # ... after this many steps: it is not urgent, because they last.
    chronic_steps: int = 40
    # No model makes one of several peers this much slower: the GPU was faulty before the job began.
    chronic_fault_slowdown: float = 1.4
    chronic_fault_steps: int = 6  # number of steps that must agree
    # With a single peer, the peer may be the outlier: such slowness is reported only as advice.
    chronic_fault_peers: int = 2
    # A busy host leaves one rank after the other without a CPU for some seconds: a rank that waits
    # for one is reported when it has been slow for this long.
    contention_seconds: float = 15.0


DEFAULTS = StragglerSettings()
