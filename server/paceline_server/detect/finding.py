"""What a detector says."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline_wire.batch import RankStackTraces

Persistence = Literal["persistent", "transient", "chronic"]
Side = Literal["host", "device", "mismatch"]


class Evidence(msgspec.Struct, frozen=True):
    """One observation for (or, in `counter_evidence`, against) a finding, with its numbers."""

    text: str  # "SM clock of gpu0 on node 1 fell from 1980 to 795 MHz at step 41"
    metric: str | None = None
    value: float | None = None
    expected: float | None = None


class Cause(msgspec.Struct, frozen=True):
    """One possible reason, weighed. Likelihoods of a finding's causes sum to at most 1."""

    name: str  # as in `Finding.cause`
    likelihood: float  # 0..1
    evidence: list[Evidence] = []
    counter_evidence: list[Evidence] = []


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One detector's verdict at one moment.

    The same trouble keeps its `fingerprint` for as long as it lasts within a generation, so that
    later findings update an incident instead of opening another. `cleared` says it is over.
    Times are nanoseconds of CLOCK_REALTIME.
    """

    kind: str  # "straggler", "slow_link", "stage_imbalance", "bubble", "hang", "failure", ...
    cause: str  # "thermal throttle", "killed by signal 9", "process stopped", ..., "unknown"
    fingerprint: str
    summary: str  # one sentence: who, what, by how much, why
    detected_ns: int
    generation: int
    rank: int | None = None
    node: str | None = None  # agent_id
    stage: int | None = None
    onset_step: int | None = None
    step: int | None = None  # the newest step that was looked at
    slowdown: float | None = None  # self-time over peers' self-time; 1.0 = healthy
    cost_ratio: float | None = None  # share of the step time lost to this, 0..1
    speedup: float | None = None  # step time over that of a replay without it; 1.21 = 21% gained
    persistence: Persistence | None = None  # None: not judged
    ranks: list[int] = []  # all that are concerned, where it is not `rank` alone
    link: tuple[int, int] | None = None  # ranks (source, destination) of a slow one
    side: Side | None = None  # of a hang: where it is stuck
    causes: list[Cause] = []  # likeliest first
    advice: str | None = None  # what to change in the training, and what it would give
    severity: str = "warning"  # "info", "warning", "critical"
    suspects_node: bool = False  # the node itself, not only the process, is the problem
    can_checkpoint: bool = True  # ranks still make progress, so a planned restart is possible
    cleared: bool = False
    evidence: list[Evidence] = []
    counter_evidence: list[Evidence] = []
    stacks_wanted: list[int] = []  # ranks whose Python stacks would tell more, most wanted first
    stacks: list[RankStackTraces] = []  # those that were taken
    dumps_wanted: bool = False  # Flight Recorder dumps of all ranks would tell more ...
    dumps_told: bool = False  # ... and what came of them is among the evidence
