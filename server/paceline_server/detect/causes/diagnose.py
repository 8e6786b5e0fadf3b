"""The question and its answer: `diagnose` asks every check and weighs what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalogue import CAUSES, UNKNOWN
from paceline_server.detect.causes.checks import (
    clocks,
    cpu,
    disk,
    gpu_errors,
    gpu_memory,
    kernel_log,
    memory,
    network,
    pcie,
    process,
)
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import MetricObservation, Symptom, together
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.detect.observation import Generation, Observation

CHECKS: tuple[Callable[[Suspect], list[MetricObservation]], ...] = (
    clocks.check,
    gpu_memory.check,
    gpu_errors.check,
    pcie.check,
    network.check,
    cpu.check,
    memory.check,
    disk.check,
    process.check,
    kernel_log.check,
)
SYMPTOMS: tuple[Symptom, ...] = (
    *clocks.SYMPTOMS,
    *gpu_memory.SYMPTOMS,
    *gpu_errors.SYMPTOMS,
    *pcie.SYMPTOMS,
    *network.SYMPTOMS,
    *cpu.SYMPTOMS,
    *memory.SYMPTOMS,
    *disk.SYMPTOMS,
    *kernel_log.SYMPTOMS,
)
# Clocks of nodes are shifted to the server's only where they are off by more than delivery may
# take; the onset is a step's beginning, give or take two.
_CLOCKS_SECONDS = 3.0
_ONSET_STEPS = 2
_MOST_SECONDS = 60.0
# Slow from here on since the generation began: there was no healthy time.
_FIRST_STEPS = 8
_WORTH_TELLING = 0.02
_OF_LIKELY = 0.25
_WORTH_MEASURING = 0.05  # as a prior
_OF_GPUS = {each.cause for each in SYMPTOMS if each.scope is Scope.GPU} | {gpu_errors.XID_CAUSE}


@dataclass(slots=True)
class Diagnosis:
    """`causes`: likeliest first; what they leave to 1 is unknown. `on_node`: not this process."""

    cause: str = UNKNOWN
    on_node: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    counter_evidence: list[Evidence] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)  # subjects: "clock", "PCIe", ...
    not_measured: list[str] = field(default_factory=list)
    rank: int | None = None  # of a link: the end at which the cause was found

    @property
    def text(self) -> str:
        """The cause for a sentence; without one, what it is not."""
        if self.cause != UNKNOWN or not self.ruled_out:
            return self.cause
        return f"{UNKNOWN}, but not: {', '.join(self.ruled_out)}"

    @property
    def advice(self) -> str | None:
        return CAUSES[self.cause].advice if self.cause in CAUSES else None


def diagnose(
    rank: int | None,
    onset_ns: int,
    onset_step: int | None,
    seen: Observation,
    generation: Generation,
    *,
    kind: str = "straggler",
    slowdown: float | None = None,
    node: str | None = None,
    peer: int | None = None,
) -> Diagnosis:
    """Args:

    rank: Who is slow; None for a whole `node`. Of a link, one end; `peer` is the other.
    onset_ns: When it became slow, on the server's clock.
    kind: Of the finding; it decides which causes are considered (`catalogue.py`).
    slowdown: How many times slower than healthy; a cause that cannot explain it is less likely.
    """
    node = node or generation.node(rank)
    if node is None:
        return Diagnosis(not_measured=_subjects(kind, ()))
    suspect = _suspect(rank, node, onset_ns, onset_step, seen, generation, kind, slowdown)
    found = _answer(suspect, _looks(suspect))
    if peer is not None and (other_node := generation.node(peer)) not in (None, node):
        assert other_node is not None
        other = _suspect(peer, other_node, onset_ns, onset_step, seen, generation, kind, slowdown)
        found = _worse_end(found, _answer(other, _looks(other)))
    found.counter_evidence += _missing(found, suspect)
    return found


def _missing(found: Diagnosis, suspect: Suspect) -> list[Evidence]:
    """Of an unknown cause: what might have told it, had it been measured."""
    if found.cause != UNKNOWN:
        return []
    has_gpu = any(suspect.generation.gpus.get(rank) is not None for rank in suspect.ranks)
    shares = dict.fromkeys(found.not_measured, 0.0)
    for name, info in CAUSES.items():
        if info.subject in shares and (has_gpu or name not in _OF_GPUS):
            shares[info.subject] += info.priors.get(suspect.kind, 0.0)
    told = sorted(
        (subject for subject, share in shares.items() if share >= _WORTH_MEASURING),
        key=lambda subject: -shares[subject],
    )
    return [Evidence(f"not measured: {', '.join(told)}")] if told else []


def _suspect(
    rank: int | None,
    node: str,
    onset_ns: int,
    onset_step: int | None,
    seen: Observation,
    generation: Generation,
    kind: str,
    slowdown: float | None,
) -> Suspect:
    tolerance = _CLOCKS_SECONDS + _ONSET_STEPS * (seen.step_seconds_p99 or 0.0)
    return Suspect(
        rank=rank,
        node=node,
        onset_ns=onset_ns,
        onset_step=onset_step,
        is_chronic=_is_chronic(onset_step, seen),
        kind=kind,
        slowdown=slowdown,
        tolerance_seconds=min(tolerance, _MOST_SECONDS),
        seen=seen,
        generation=generation,
    )


def _is_chronic(onset_step: int | None, seen: Observation) -> bool:
    if onset_step is None:
        return True
    if not seen.steps:
        return False
    first_step = seen.steps[-1].step - seen.steps_finished + 1
    return onset_step - first_step < _FIRST_STEPS


def _looks(suspect: Suspect) -> dict[str, MetricObservation]:
    """By cause, those only that this kind of finding can have."""
    looks: dict[str, list[MetricObservation]] = {}
    for check in CHECKS:
        for each in check(suspect):
            if suspect.kind in CAUSES[each.cause].priors:
                looks.setdefault(each.cause, []).append(each)
    return {
        cause: together(cause, some) if len(some) > 1 else some[0] for cause, some in looks.items()
    }


def _answer(suspect: Suspect, looks: dict[str, MetricObservation]) -> Diagnosis:
    weights = {cause: each.weight for cause, each in looks.items()}
    found = weighing.likelihoods(weights, suspect.kind)
    ranked = sorted(found, key=lambda cause: -found[cause])
    diagnosis = Diagnosis(rank=suspect.rank)
    best = ranked[0] if ranked else None
    if best is not None and weights[best] > 0 and _is_likely(found, best):
        diagnosis.cause, diagnosis.on_node = best, CAUSES[best].on_node
    for cause in ranked:
        look = looks[cause]
        lines = list(look.evidence)
        if look.weight > 0:
            _tell(diagnosis.evidence, lines)
            if found[cause] >= _WORTH_TELLING:
                diagnosis.causes.append(Cause(cause, found[cause], lines))
        else:
            _tell(diagnosis.counter_evidence, lines)
            if found[cause] >= _WORTH_TELLING:
                diagnosis.causes.append(Cause(cause, found[cause], [], lines))
    dismissed = [cause for cause in CAUSES if weights.get(cause, 0.0) <= weighing.RULED_OUT]
    standing = {CAUSES[cause].subject for cause in looks if cause not in dismissed}
    diagnosis.ruled_out = _unique(
        CAUSES[cause].subject for cause in dismissed if CAUSES[cause].subject not in standing
    )
    diagnosis.not_measured = _subjects(suspect.kind, looks)
    return diagnosis


def _tell(told: list[Evidence], lines: list[Evidence]) -> None:
    """Two causes may be read from one metric; it is told once."""
    told += [line for line in lines if line not in told]


def _is_likely(found: dict[str, float], cause: str) -> bool:
    return found[cause] >= max(_OF_LIKELY, weighing.unknown_share(found))


def _subjects(kind: str, looked_at: Iterable[str]) -> list[str]:
    """What this kind of finding could have come from, and nobody measured."""
    seen = set(looked_at)
    known = {CAUSES[cause].subject for cause in seen}
    missing = (
        info.subject for name, info in CAUSES.items() if kind in info.priors and name not in seen
    )
    return _unique(subject for subject in missing if subject not in known)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _worse_end(one: Diagnosis, other: Diagnosis) -> Diagnosis:
    """Of a link's two ends, the one that explains it; what is normal at both is ruled out."""
    first, second = sorted((one, other), key=lambda each: -_best(each))
    first.counter_evidence += second.counter_evidence
    first.ruled_out = [each for each in first.ruled_out if each in second.ruled_out]
    return first


def _best(diagnosis: Diagnosis) -> float:
    named = diagnosis.cause != UNKNOWN
    return (diagnosis.causes[0].likelihood if diagnosis.causes else 0.0) + named
