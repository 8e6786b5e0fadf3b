"""Detect silent corruption: replicas of one parameter that no longer have the same content.

The ranks compare checksums of their parameters (`paceline.checkpoints.replicas`) and report the
first difference of each set of replicas. With three replicas and more, those that differ from the
majority are named. Of two that differ, it is not known which one is right.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import CORRUPTION, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy
from paceline_wire.metadata import REPLICA_MISMATCH

CAUSE = "silent corruption"


class ReportedMismatch(msgspec.Struct, frozen=True):
    """Replicas that differ, as a rank reports them; see `paceline.checkpoints.replicas`."""

    step: int
    agreed_step: int | None
    tensor: str
    ranks: list[int]
    outliers: list[int]


_decoder = msgspec.json.Decoder(ReportedMismatch)


class ReplicaDetector(Detector):
    """Finding kind `corruption`, cause `silent corruption`, fingerprint `corruption:TENSOR`."""

    kinds: ClassVar[tuple[Kind, ...]] = (CORRUPTION,)
    order: ClassVar[int] = 32

    def __init__(self, generation: Generation, policy: Policy) -> None:
        super().__init__(generation, policy)
        self._seen: str | None = None

    def update(self, observation: Observation) -> list[Finding]:
        text = observation.metadata.get(REPLICA_MISMATCH)
        if text is None or text == self._seen:
            return []
        self._seen = text
        try:
            found = _decoder.decode(text)
        except msgspec.DecodeError:  # written by a rank: it may be anything
            return []
        return [self._finding(found, observation.now_ns)]

    def _finding(self, found: ReportedMismatch, now_ns: int) -> Finding:
        rank = found.outliers[0] if len(found.outliers) == 1 else None
        compared = ", ".join(map(str, found.ranks))
        if rank is not None:
            who = f"{self.generation.subject(rank)} has other parameters than its replicas"
        elif found.outliers:
            names = ", ".join(map(str, found.outliers))
            who = f"Ranks {names} have other parameters than their replicas"
        elif len(found.ranks) == 2:
            who = f"One of ranks {' and '.join(map(str, found.ranks))} has wrong parameters"
        else:
            who = f"Ranks {compared} have different parameters, without a majority"
        since = (
            "they were not compared before"
            if found.agreed_step is None
            else f"they were the same after step {found.agreed_step}"
        )
        return self.finding(
            f"corruption:{found.tensor}",
            cause=CAUSE,
            summary=f"{who}: {found.tensor} differs after step {found.step}; {since}.",
            now_ns=now_ns,
            rank=rank,
            ranks=[] if rank is not None else found.outliers or found.ranks,
            onset_step=None if found.agreed_step is None else found.agreed_step + 1,
            step=found.step,
            suspects_node=rank is not None,
            can_checkpoint=False,  # it would contain the damage
            evidence=[
                Evidence(f"checksums of {found.tensor} on ranks {compared} after step {found.step}")
            ],
        )
