"""Judges what was found in trials whose faults are known.

A fault is *detected* by a finding of its kind (`EXPECTED`), not cleared, given once the fault had
begun. It is a *hit* if one of those names the right subject: the rank, the node (or nothing but
ranks of it), the stage, both ends of the link; jobs' own troubles (sequence lengths, GC) have no
subject. *Top-1*: the first finding of that kind named the right one. *Latency*: the newest step
the engine had been fed when it gave the first hit, minus the step of the onset; of a fault that
grows, minus the first step in which it was 10%. A trial with two faults is a hit if both are, and
as late as the later one.

The *cause* is judged on hits of faults that the telemetry shows, and of those it does not show
(then "unknown" is the right answer): the newest finding's cause must contain one of `CAUSE_WORDS`.
Of a hang it is the side: host, device or mismatch.

A *false alarm* is a finding above severity `info`, not cleared, counted once for as long as it
stands, that is not about a fault that has begun: whatever comes earlier or in a job without
faults, names somebody else, or is of another kind. Not counted are `SYMPTOMS` that name the right
subject (a stage idles because of a slow rank), and findings of a fault too weak to count (below
10%) if they name the right rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from paceline_cli import render
from paceline_evaluation.faults import HANG_CAUSES, TrialFault
from paceline_evaluation.record import Seen, TrialRecord
from paceline_server.detect.finding import Finding

EXPECTED = {
    "slow_rank": "straggler",
    "slow_node": "straggler",
    "slow_link": "slow_link",
    "stage_imbalance": "stage_imbalance",
    "sequence_variance": "sequence_variance",
    "data_stall": "slow_data",
    "gc": "gc",
    "transient_stall": "transient_stall",
    "hang": "hang",
    "crash": "failure",
    "stalled_microbatch": "straggler",
    "slow_creep": "straggler",
    "late_link": "slow_link",
}
# Over before anyone could act: reported by kind, and not part of the overall figures.
FLEETING = frozenset({"transient_stall"})
# What a fault also looks like. A bubble concerns all stages, whoever makes it.
SYMPTOMS = frozenset({"bubble", "host_noise", "misplaced_rank", "transient_stall"})
CAUSE_WORDS = {
    "thermal": ("thermal", "temperature"),
    "power": ("power",),
    "pcie": ("pcie",),
    "numa": ("numa",),
    "cpu": ("cpu",),
    "memory": ("memory pressure", "swap", "paging"),
    "ecc": ("ecc",),
    "nic errors": ("nic", "link", "error", "retrans"),
    "nic rate": ("rate", "nic", "speed"),
    "congestion": ("congest",),
    "disk": ("disk", "i/o", "storage"),
    "unknown": ("unknown", "slow data loading"),
}
_CAUSED = frozenset(
    {"slow_rank", "slow_node", "slow_link", "data_stall", "stalled_microbatch", "slow_creep"}
)
_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """How one trial went."""

    kind: str
    arm: str
    number: int
    counts: bool  # its faults are at least 10%
    detected: bool
    hit: bool
    top1: bool
    cause_right: bool | None  # None: there was nothing to judge
    latency_steps: int | None
    latency_seconds: float | None
    clean_steps: int
    clean_alarms: tuple[str, ...]  # false alarms before any fault
    other_alarms: tuple[str, ...]  # false alarms beside one
    note: str = ""  # for people: what was expected and what came


def judge(record: TrialRecord) -> TrialVerdict:
    parts = [_Part.of(record, position) for position in range(len(record.faults))]
    clean, other = _false_alarms(record)
    hit = bool(parts) and all(part.hit for part in parts)
    judged = [part.cause_right for part in parts if part.cause_right is not None]
    late = [part.latency_steps for part in parts if part.latency_steps is not None]
    seconds = [part.latency_seconds for part in parts if part.latency_seconds is not None]
    return TrialVerdict(
        kind=record.kind,
        arm=record.arm,
        number=record.number,
        counts=all(fault.counts for fault in record.faults),
        detected=bool(parts) and all(part.detected for part in parts),
        hit=hit,
        top1=bool(parts) and all(part.top1 for part in parts),
        cause_right=all(judged) if judged else None,
        latency_steps=max(late) if hit else None,
        latency_seconds=max(seconds) if hit and seconds else None,
        clean_steps=record.clean_steps,
        clean_alarms=tuple(map(_text, clean)),
        other_alarms=tuple(map(_text, other)),
        note=_note(record),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One fault of a trial."""

    detected: bool
    hit: bool
    top1: bool
    cause_right: bool | None
    latency_steps: int | None
    latency_seconds: float | None

    @classmethod
    def of(cls, record: TrialRecord, position: int) -> _Part:
        fault = record.faults[position]
        others = [other for other in record.faults if other is not fault]
        mine = [
            seen
            for seen in record.seen
            if _of_kind(seen, fault) and not any(_hits(seen, other) for other in others)
        ]
        hits = [seen for seen in mine if _names(seen.finding, fault)]
        if not hits:
            return cls(bool(mine), False, False, None, None, None)
        onset_seconds = record.onset_seconds[position] if record.onset_seconds else None
        return cls(
            detected=True,
            hit=True,
            top1=_names(mine[0].finding, fault),
            cause_right=_cause_right(hits[-1].finding, fault),
            latency_steps=max(0, hits[0].step - fault.counted_step),
            latency_seconds=None if onset_seconds is None else hits[0].seconds - onset_seconds,
        )


def _of_kind(seen: Seen, fault: TrialFault) -> bool:
    """Of the fault's kind, and given once it had begun."""
    finding = seen.finding
    begun = fault.kind in ("hang", "crash") or seen.step >= fault.onset_step
    return finding.kind == EXPECTED[fault.kind] and not finding.cleared and begun


def _hits(seen: Seen, fault: TrialFault) -> bool:
    return _of_kind(seen, fault) and _names(seen.finding, fault)


def _names(finding: Finding, fault: TrialFault) -> bool:
    """Whether the finding's subject is the fault's."""
    named = {finding.rank} if finding.rank is not None else set(finding.ranks)
    if fault.link is not None:
        return finding.link is not None and set(finding.link) == set(fault.link)
    if fault.stage is not None and not fault.ranks:
        return finding.stage == fault.stage
    if fault.kind == "slow_node":
        return finding.node == _node(fault) and named <= set(fault.ranks)
    if fault.ranks:
        return named == set(fault.ranks)
    return True


def _node(fault: TrialFault) -> str:
    return f"node-{fault.node}"


def _cause_right(finding: Finding, fault: TrialFault) -> bool | None:
    if fault.kind == "hang" and fault.cause in HANG_CAUSES:
        return finding.side == fault.cause or fault.cause in finding.cause.lower()
    if fault.kind not in _CAUSED:
        return None
    return any(word in finding.cause.lower() for word in CAUSE_WORDS[fault.cause])


def _false_alarms(record: TrialRecord) -> tuple[list[Seen], list[Seen]]:
    """(before any fault, beside one), each standing finding once."""
    clean: list[Seen] = []
    other: list[Seen] = []
    for seen in _standing(record.seen):
        begun = [fault for fault in record.faults if _has_begun(seen, fault)]
        if not begun and seen.finding.severity != "info":
            clean.append(seen)
        elif begun and not any(_is_about(seen.finding, fault) for fault in begun):
            other.append(seen)
    return clean, other


def _standing(found: Sequence[Seen]) -> Iterator[Seen]:
    """The first finding of each trouble, and again when it comes back after it was cleared."""
    standing: set[str] = set()
    for seen in found:
        fingerprint = seen.finding.fingerprint
        if seen.finding.cleared:
            standing.discard(fingerprint)
        elif fingerprint not in standing:
            standing.add(fingerprint)
            yield seen


def _has_begun(seen: Seen, fault: TrialFault) -> bool:
    if fault.kind in ("hang", "crash"):
        return seen.step >= fault.onset_step - 1
    return seen.step >= fault.onset_step


def _is_about(finding: Finding, fault: TrialFault) -> bool:
    """Right, a symptom of it, or advice."""
    if finding.kind == EXPECTED[fault.kind]:
        return _names(finding, fault)
    if finding.severity == "info" or finding.kind == "bubble":
        return True
    touched = set(fault.ranks) | set(fault.link or ())
    concerns = finding.rank in touched or finding.node == _node(fault)
    return concerns and (finding.kind in SYMPTOMS or not fault.counts)


def _text(seen: Seen) -> str:
    finding = seen.finding
    return f"step {seen.step}: {finding.kind} ({finding.cause}): {finding.summary}"


def _note(record: TrialRecord) -> str:
    expected = "; ".join(
        f"{fault.kind} {render.percent(fault.magnitude, 0)} from step {fault.onset_step} "
        f"ranks {list(fault.ranks)} node {fault.node} stage {fault.stage} link {fault.link} "
        f"cause {fault.cause}"
        for fault in record.faults
    )
    return f"{record.job} | {expected or 'nothing'}"


# Figures over many trials


def wilson(hits: int, count: int) -> list[float] | None:
    """95% interval of a share (E. B. Wilson, JASA 22, 1927); None of nothing."""
    if not count:
        return None
    share, square = hits / count, _Z95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z95 * sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return [round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)]


def figures(verdicts: Sequence[TrialVerdict], kinds: Sequence[str]) -> dict[str, object]:
    """The report's JSON, of all arms together."""
    by_kind = {kind: _of_one_kind([one for one in verdicts if one.kind == kind]) for kind in kinds}
    return {"overall": _overall(verdicts), "by_kind": by_kind}


def _overall(verdicts: Sequence[TrialVerdict]) -> dict[str, object]:
    counted = [
        one for one in verdicts if one.kind != "none" and one.kind not in FLEETING and one.counts
    ]
    hits = sum(one.hit for one in counted)
    clean_steps = sum(one.clean_steps for one in verdicts)
    clean_alarms = sum(len(one.clean_alarms) for one in verdicts)
    alarms = clean_alarms + sum(len(one.other_alarms) for one in verdicts)
    precision, recall = _share(hits, hits + alarms), _share(hits, len(counted))
    f1 = None
    if precision is not None and recall is not None:
        f1 = round(2 * precision * recall / (precision + recall), 4) if hits else 0.0
    return {
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "false_alarms_per_10k_steps": (
            round(clean_alarms / clean_steps * 10_000, 3) if clean_steps else None
        ),
        "clean_steps": clean_steps,
        "false_alarms": alarms,
        "false_alarms_in_clean_steps": clean_alarms,
        "top1": _share(sum(one.top1 for one in counted), sum(one.detected for one in counted)),
        "cause_accuracy": _causes(counted),
        "faults": len(counted),
        "ci95": wilson(hits, len(counted)),
    }


def _of_one_kind(verdicts: Sequence[TrialVerdict]) -> dict[str, object]:
    counted = [one for one in verdicts if one.counts and one.kind != "none"]
    weak = [one for one in verdicts if not one.counts]
    hits = sum(one.hit for one in counted)
    steps = [one.latency_steps for one in counted if one.latency_steps is not None]
    seconds = [one.latency_seconds for one in counted if one.latency_seconds is not None]
    found: dict[str, object] = {
        "n": len(verdicts) - len(weak),
        "recall": _share(hits, len(counted)),
        "top1": _share(sum(one.top1 for one in counted), sum(one.detected for one in counted)),
        "cause_accuracy": _causes(counted),
        "latency_steps_p50": _percentile(steps, 50),
        "latency_steps_p90": _percentile(steps, 90),
        "ci95": wilson(hits, len(counted)),
        "latency_seconds_p50": _percentile(seconds, 50),
        "latency_seconds_p90": _percentile(seconds, 90),
        "false_alarms": sum(len(one.clean_alarms) + len(one.other_alarms) for one in verdicts),
    }
    if weak:
        found["weak"] = {"n": len(weak), "recall": _share(sum(w.hit for w in weak), len(weak))}
    return found


def _causes(verdicts: Sequence[TrialVerdict]) -> float | None:
    judged = [one.cause_right for one in verdicts if one.cause_right is not None]
    return _share(sum(judged), len(judged))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
