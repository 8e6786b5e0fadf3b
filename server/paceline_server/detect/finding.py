"""A finding: the verdict of a detector, with its causes and evidence."""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec

from paceline_wire.batch import RankStackTraces

Persistence = Literal["persistent", "transient", "chronic"]
Side = Literal["host", "device", "mismatch"]


class Evidence(msgspec.Struct, frozen=True):
    """One measurement that supports a finding or, in `counter_evidence`, speaks against it."""

    text: str  # "SM clock of gpu0 on node 1 fell from 1980 to 795 MHz at step 41"
    metric: str | None = None
    value: float | None = None
    expected: float | None = None


class Cause(msgspec.Struct, frozen=True):
    """One possible cause. The likelihoods of a finding's causes sum to at most 1."""

    name: str  # as in `Finding.cause`
    likelihood: float  # 0..1
    evidence: list[Evidence] = []
    counter_evidence: list[Evidence] = []


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one detector at one moment.

    A problem keeps its `fingerprint` for as long as it lasts within a generation, so that later
    findings update its incident instead of opening another. `cleared`: the problem is over.
    Times are nanoseconds of the server's CLOCK_REALTIME. `FindingDetails` repeats the optional
    fields.
    """

    kind: str  # a name of `kinds.KINDS`
    cause: str  # "thermal throttle", "killed by signal 9", "process stopped", ..., "unknown"
    fingerprint: str
    summary: str  # one sentence: who, what, since when, why, at what cost
    detected_ns: int
    generation: int
    rank: int | None = None
    node: str | None = None  # agent_id
    stage: int | None = None
    onset_step: int | None = None
    step: int | None = None  # the newest step that was analyzed
    slowdown: float | None = None  # self-time over peers' self-time; 1.0 = healthy
    cost_ratio: float | None = None  # share of the step time lost to this problem, 0..1
    # step time over that of a replay without the problem; 1.21 = 21% gained
    speedup: float | None = None
    persistence: Persistence | None = None  # None: not judged
    ranks: list[int] = []  # all affected ranks, if more than `rank`
    link: tuple[int, int] | None = None  # ranks (source, destination) of a slow link
    side: Side | None = None  # hangs only: where it is stuck
    causes: list[Cause] = []  # likeliest first
    advice: str | None = None  # what to change in the training, and the gain
    severity: str = "warning"  # "info", "warning", "critical"
    suspects_node: bool = False  # the node itself, not only the process, is the problem
    can_checkpoint: bool = True  # ranks still make progress, so a planned restart is possible
    cleared: bool = False
    follows: str | None = None  # kind of an earlier finding of which this one is only a consequence
    evidence: list[Evidence] = []
    counter_evidence: list[Evidence] = []
    stacks_wanted: list[int] = []  # ranks whose Python stacks would help, most useful first
    stacks: list[RankStackTraces] = []  # the stacks that were taken
    profiles_wanted: list[int] = []  # ranks whose Python stacks would help, sampled for some steps
    dumps_wanted: bool = False  # Flight Recorder dumps of all ranks would help ...
    # ... and their conclusion is part of the evidence. Stored under its former name.
    dumps_reported: bool = msgspec.field(name="dumps_told", default=False)


class FindingDetails(TypedDict, total=False):
    """The optional fields of a finding, as keyword arguments of `Detector.finding`."""

    rank: int | None
    node: str | None
    stage: int | None
    onset_step: int | None
    step: int | None
    slowdown: float | None
    cost_ratio: float | None
    speedup: float | None
    persistence: Persistence | None
    ranks: list[int]
    link: tuple[int, int] | None
    side: Side | None
    causes: list[Cause]
    advice: str | None
    severity: str
    suspects_node: bool
    can_checkpoint: bool
    follows: str | None
    evidence: list[Evidence]
    counter_evidence: list[Evidence]
    stacks_wanted: list[int]
    stacks: list[RankStackTraces]
    profiles_wanted: list[int]
    dumps_wanted: bool


def cleared(finding: Finding, summary: str, now_ns: int, step: int | None = None) -> Finding:
    """Return the finding as reported when the problem is over.

    `step`: the newest, if it changed.
    """
    return msgspec.structs.replace(
        finding,
        cleared=True,
        summary=summary,
        detected_ns=now_ns,
        step=finding.step if step is None else step,
    )
