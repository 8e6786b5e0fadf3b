"""The kinds of findings: one row each, with what the rest of Paceline needs to know about it.

Names are stable: alerts, policies, dashboards and stored incidents match on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # least first
Effect = Literal["slow", "stopped", "none"]


def severity_rank(severity: str) -> int:
    """Return the position of a severity, the least first; an unknown one counts as a warning."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else 1


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding."""

    name: str
    # Default of a finding; the detector may set another.
    severity: Severity
    # Effect on training. "stopped": if critical, no useful step follows.
    effect: Effect
    # Whether a restart, without the node if it is suspected, can fix it.
    restartable: bool = False
    # Whether its findings name the ranks that make all others wait.
    names_ranks: bool = False
    # The finding with the highest precedence is the main finding of a shared incident.
    precedence: int = 1
    # Kinds whose findings are only symptoms of a simultaneous finding of this kind.
    explains: frozenset[str] = frozenset()

    @property
    def is_slow_fault(self) -> bool:
        """Return whether a rank, its node or its network is to blame for slowness."""
        return self.effect == "slow" and self.restartable


KINDS: dict[str, Kind] = {}


def _row(kind: Kind) -> Kind:
    assert kind.name not in KINDS
    KINDS[kind.name] = kind
    return kind


_BUBBLE = frozenset({"bubble"})

STRAGGLER = _row(
    Kind("straggler", "warning", "slow", restartable=True, names_ranks=True, explains=_BUBBLE)
)
SLOW_DATA = _row(
    Kind("slow_data", "warning", "slow", restartable=True, names_ranks=True, explains=_BUBBLE)
)
SLOW_LINK = _row(Kind("slow_link", "warning", "slow", restartable=True, explains=_BUBBLE))
STAGE_IMBALANCE = _row(Kind("stage_imbalance", "info", "slow"))
SEQUENCE_VARIANCE = _row(Kind("sequence_variance", "info", "slow", explains=_BUBBLE))
ROUTING_IMBALANCE = _row(Kind("routing_imbalance", "info", "slow", explains=_BUBBLE))
GC = _row(Kind("gc", "info", "slow", explains=_BUBBLE))
CHECKPOINT_STALL = _row(Kind("checkpoint_stall", "warning", "slow"))
SLOW_EVALUATION = _row(Kind("slow_evaluation", "warning", "slow", names_ranks=True))
CHECKPOINT_FAILURE = _row(Kind("checkpoint_failure", "warning", "none"))
SLOWER_STEPS = _row(Kind("slower_steps", "info", "slow"))
HOST_NOISE = _row(Kind("host_noise", "info", "slow", explains=_BUBBLE))
TRANSIENT_STALL = _row(Kind("transient_stall", "info", "slow"))
MISPLACED_RANK = _row(Kind("misplaced_rank", "info", "none"))
BUBBLE = _row(Kind("bubble", "info", "slow", precedence=0))
GPU_ERROR = _row(Kind("gpu_error", "warning", "none"))
EARLIER_RUN = _row(Kind("earlier_run", "critical", "none"))
LOSS = _row(Kind("loss", "warning", "none"))
CORRUPTION = _row(Kind("corruption", "critical", "none"))
HANG = _row(Kind("hang", "critical", "stopped", restartable=True, precedence=2))
FAILURE = _row(Kind("failure", "critical", "stopped", restartable=True, precedence=3))


def kind_of(name: str) -> Kind:
    """Return the row of a kind; a default row for a name from an older or newer server."""
    return KINDS.get(name) or Kind(name, "warning", "none")
