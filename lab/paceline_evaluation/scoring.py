"""Compare the findings of a trial with its known faults.

A fault is *detected* if, after its onset, a finding of its kind (`EXPECTED`) is reported and not
cleared. It is a *hit* if such a finding has the correct subject: the rank, the node (or only ranks
of that node), the stage, or both ends of the link. Faults of the whole job (sequence lengths, GC)
have no subject.

*Top-1*: the first finding of that kind had the correct subject.

*Latency*: the latest step the engine had received at the first hit, minus the step of the onset.
For a fault that grows, the onset is the first step in which it costs 10%. A trial with two faults
is a hit if both are hits; its latency is the larger of the two.

The *cause* is scored on hits. The cause of the latest finding must contain one of `CAUSE_WORDS`; if
the telemetry does not show the cause, "unknown" is correct. For a hang, the side is scored: host,
device or mismatch.

A *false alarm* is a finding above severity `info`, not cleared, that no active fault explains: it
comes before the onset or in a job without faults, or has another subject or kind. It counts once
until it is cleared. Three cases do not count: `SYMPTOMS` with the correct subject (a stage that
idles because of a slow rank), findings with the correct rank for a fault below 10%, and slower
steps that begin where all ranks of the job do become slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from paceline_cli import render
from paceline_evaluation.faults import HANG_CAUSES, CommonChange, TrialFault
from paceline_evaluation.record import ReportedFinding, TrialRecord
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
# Too short to act on: reported by kind, and not part of the overall figures.
FLEETING = frozenset({"transient_stall"})
# Findings that a fault also causes. A bubble affects all stages, whatever its cause.
SYMPTOMS = frozenset({"bubble", "host_noise", "misplaced_rank", "transient_stall"})
CAUSE_WORDS = {
    "thermal": ("thermal", "temperature"),
    "power": ("power",),
    "pcie": ("pcie",),
    "numa": ("numa",),
    "cpu": ("cpu",),
    "memory": ("memory pressure", "swap", "paging"),
    "ecc": ("ecc",),
    "nic errors": ("nic error", "link errors", "packet loss"),
    "nic rate": ("low link rate",),
    "congestion": ("congest",),
    "disk": ("disk", "i/o", "storage"),
    # Packets that the queue of the limit drops are sent again, which is visible if it occurs.
    "rate limit": ("unknown", "packet loss"),
    "unknown": ("unknown", "slow data loading"),
}
_CAUSED = frozenset(
    {"slow_rank", "slow_node", "slow_link", "data_stall", "stalled_microbatch", "slow_creep"}
)
_Z95 = 1.959964
_CHANGE_STEPS = 8  # the reported onset of a change of all ranks is at most this far from it
_CHANGE_SHARE = 1.1  # and the reported slowdown at most this many times the change
_REPORTED_IN_NOTE = 4  # newest findings


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """The score of one trial."""

    kind: str
    arm: str
    number: int
    counts: bool  # whether its faults cost at least 10%
    detected: bool
    hit: bool
    top1: bool
    cause_correct: bool | None  # None: not scored
    latency_steps: int | None
    latency_seconds: float | None
    clean_steps: int
    clean_alarms: tuple[str, ...]  # false alarms before any fault
    other_alarms: tuple[str, ...]  # false alarms during a fault
    note: str = ""  # job and faults, for the user
    way: str = ""  # how the fault of the foreign arm occurs
    trainer: str = ""
    headline_correct: bool | None = None  # None: not scored
    clean_seconds: float = 0.0
    clean_criticals: int = 0  # those of the false alarms before any fault


def judge(record: TrialRecord) -> TrialVerdict:
    """Return the score of a trial."""
    parts = [_FaultVerdict.of(record, position) for position in range(len(record.faults))]
    clean, other = _false_alarms(record)
    hit = bool(parts) and all(part.hit for part in parts)
    causes = [part.cause_correct for part in parts if part.cause_correct is not None]
    latencies = [part.latency_steps for part in parts if part.latency_steps is not None]
    seconds = [part.latency_seconds for part in parts if part.latency_seconds is not None]
    return TrialVerdict(
        kind=record.kind,
        arm=record.arm,
        number=record.number,
        counts=all(fault.counts for fault in record.faults),
        detected=bool(parts) and all(part.detected for part in parts),
        hit=hit,
        top1=bool(parts) and all(part.top1 for part in parts),
        cause_correct=all(causes) if causes else None,
        latency_steps=max(latencies) if hit else None,
        latency_seconds=max(seconds) if hit and seconds else None,
        clean_steps=record.clean_steps,
        clean_alarms=tuple(map(_text, clean)),
        other_alarms=tuple(map(_text, other)),
        note=_note(record),
        way=record.faults[0].way if record.faults else "",
        trainer=record.trainer,
        headline_correct=parts[0].headline_correct if parts else None,
        clean_seconds=record.clean_seconds,
        clean_criticals=sum(one.finding.severity == "critical" for one in clean),
    )


@dataclass(frozen=True, slots=True)
class _FaultVerdict:
    """The score of one fault of a trial."""

    detected: bool
    hit: bool
    top1: bool
    cause_correct: bool | None
    latency_steps: int | None
    latency_seconds: float | None
    headline_correct: bool | None = None

    @classmethod
    def of(cls, record: TrialRecord, position: int) -> _FaultVerdict:
        fault = record.faults[position]
        others = [other for other in range(len(record.faults)) if other != position]
        own = [
            finding
            for finding in record.findings
            if _has_kind(finding, record, position)
            and not any(_hits(finding, record, other) for other in others)
        ]
        hits = [reported for reported in own if _names(reported.finding, fault)]
        if not hits:
            return cls(bool(own), False, False, None, None, None)
        onset_seconds = _onset_seconds(record, position)
        return cls(
            detected=True,
            hit=True,
            top1=_names(own[0].finding, fault),
            cause_correct=_is_cause_correct(hits[-1].finding, fault),
            latency_steps=max(0, hits[0].step - fault.counted_step),
            latency_seconds=None if onset_seconds is None else hits[0].seconds - onset_seconds,
            headline_correct=fault.headline in hits[-1].finding.summary if fault.headline else None,
        )


def _has_kind(reported: ReportedFinding, record: TrialRecord, position: int) -> bool:
    """Return whether it has the fault's kind and was reported after the onset."""
    finding, fault = reported.finding, record.faults[position]
    begun = _has_begun(reported, record, position)
    return finding.kind == EXPECTED[fault.kind] and not finding.cleared and begun


def _hits(reported: ReportedFinding, record: TrialRecord, position: int) -> bool:
    fault = record.faults[position]
    return _has_kind(reported, record, position) and _names(reported.finding, fault)


def _names(finding: Finding, fault: TrialFault) -> bool:
    """Return whether the finding's subject is the fault's."""
    named = {finding.rank} if finding.rank is not None else set(finding.ranks)
    if fault.kind == "slow_link" and fault.ranks:
        return _crosses(finding, fault)
    if fault.link is not None:
        return finding.link is not None and set(finding.link) == set(fault.link)
    if fault.stage is not None and not fault.ranks:
        return finding.stage == fault.stage
    if fault.kind == "slow_node":
        return finding.node == _node(fault) and named <= set(fault.ranks)
    if fault.way in ("disconnect", "reset") and finding.rank is None:
        return True  # nothing shows which end broke the connection
    if fault.ranks:
        return named == set(fault.ranks)
    return True


def _crosses(finding: Finding, fault: TrialFault) -> bool:
    """Return whether the finding names the network of a node, or a link between both nodes."""
    named = finding.link or finding.ranks
    nodes = {rank // (len(fault.ranks) // 2) for rank in named}
    return len(nodes) == 2 or (finding.link is None and finding.node is not None)


def names_fault(finding: Finding, fault: TrialFault) -> bool:
    """Return whether the finding has the fault's kind and subject."""
    return finding.kind == EXPECTED[fault.kind] and _names(finding, fault)


def _node(fault: TrialFault) -> str:
    return f"node-{fault.node}"


def _is_cause_correct(finding: Finding, fault: TrialFault) -> bool | None:
    if fault.kind == "hang" and fault.cause in HANG_CAUSES:
        return finding.side == fault.cause or fault.cause in finding.cause.lower()
    if fault.kind not in _CAUSED:
        return None
    return any(word in finding.cause.lower() for word in CAUSE_WORDS[fault.cause])


def _false_alarms(record: TrialRecord) -> tuple[list[ReportedFinding], list[ReportedFinding]]:
    """Return the false alarms before any fault, and those during one."""
    clean: list[ReportedFinding] = []
    other: list[ReportedFinding] = []
    for reports in _active_reports(record.findings):
        for reported in _notable(reports):
            if _is_change(reported.finding, record.change):
                continue
            begun = [
                fault
                for position, fault in enumerate(record.faults)
                if _has_begun(reported, record, position)
            ]
            if not begun and reported.finding.severity != "info":
                clean.append(reported)
                break
            if begun and not any(_is_about(reported.finding, fault) for fault in begun):
                other.append(reported)
                break
    return clean, other


def _is_change(finding: Finding, change: CommonChange | None) -> bool:
    """Return whether the finding reports that all ranks became slower, which they did."""
    if change is None or change.factor <= 1.0 or finding.kind != "slower_steps":
        return False
    onset = finding.onset_step
    is_near = onset is not None and abs(onset - change.step) <= _CHANGE_STEPS
    return is_near and (finding.slowdown or 1.0) <= change.factor * _CHANGE_SHARE


def _active_reports(found: Sequence[ReportedFinding]) -> list[list[ReportedFinding]]:
    """Return the reports of each finding until it was cleared, in the order of the first ones."""
    result: list[list[ReportedFinding]] = []
    active: dict[str, list[ReportedFinding]] = {}
    for reported in found:
        fingerprint = reported.finding.fingerprint
        if reported.finding.cleared:
            active.pop(fingerprint, None)
        elif fingerprint in active:
            active[fingerprint].append(reported)
        else:
            active[fingerprint] = [reported]
            result.append(active[fingerprint])
    return result


def _notable(reports: Sequence[ReportedFinding]) -> Iterator[ReportedFinding]:
    """Yield the first report, and if that is information, the first above severity `info`."""
    yield reports[0]
    if reports[0].finding.severity == "info":
        yield from [one for one in reports if one.finding.severity != "info"][:1]


def _has_begun(reported: ReportedFinding, record: TrialRecord, position: int) -> bool:
    """Return whether the fault had begun; by time for a hang or exit, which no step follows."""
    fault, onset_seconds = record.faults[position], _onset_seconds(record, position)
    if fault.kind not in ("hang", "crash") or onset_seconds is None:
        return reported.step >= fault.onset_step
    return reported.seconds >= onset_seconds


def _onset_seconds(record: TrialRecord, position: int) -> float | None:
    return record.onset_seconds[position] if record.onset_seconds else None


def _is_about(finding: Finding, fault: TrialFault) -> bool:
    """Return whether the finding is the fault's verdict, a symptom of it, or information."""
    if finding.kind == EXPECTED[fault.kind]:
        return _names(finding, fault)
    if finding.severity == "info" or finding.kind == "bubble":
        return True
    touched = set(fault.ranks) | set(fault.link or ())
    concerns = finding.rank in touched or finding.node == _node(fault)
    return concerns and (finding.kind in SYMPTOMS or not fault.counts)


def _text(reported: ReportedFinding) -> str:
    finding = reported.finding
    return f"step {reported.step}: {finding.kind} ({finding.cause}): {finding.summary}"


def _note(record: TrialRecord) -> str:
    expected = "; ".join(
        f"{fault.way or fault.kind} {render.percent(fault.magnitude, 0)} "
        f"from step {fault.onset_step} ranks {list(fault.ranks)} node {fault.node} "
        f"stage {fault.stage} link {fault.link} cause {fault.cause}"
        for fault in record.faults
    )
    reported = "; ".join(
        f"{reported.finding.kind} ({reported.finding.cause}): {reported.finding.summary}"
        for reported in record.findings[-_REPORTED_IN_NOTE:]
    )
    return f"{record.job} | {expected or 'nothing'} | reports: {reported or 'nothing'}"


# Figures over many trials


def wilson(hits: int, count: int) -> list[float] | None:
    """Return the 95% interval of a share (E. B. Wilson, JASA 22, 1927); None if `count` is 0."""
    if not count:
        return None
    share, square = hits / count, _Z95**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z95 * sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return [round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)]


def figures(verdicts: Sequence[TrialVerdict], kinds: Sequence[str]) -> dict[str, object]:
    """Return the figures of all trials, overall and by kind, as `--json` prints them."""
    by_kind = {
        kind: _kind_figures([verdict for verdict in verdicts if verdict.kind == kind])
        for kind in kinds
    }
    result: dict[str, object] = {"overall": _overall(verdicts), "by_kind": by_kind}
    for key in ("way", "trainer"):  # the groups of the foreign arm
        if names := sorted({getattr(verdict, key) for verdict in verdicts} - {""}):
            result[f"by_{key}"] = {
                name: _kind_figures([one for one in verdicts if getattr(one, key) == name])
                for name in names
            }
    return result


def _overall(verdicts: Sequence[TrialVerdict]) -> dict[str, object]:
    counted = [
        verdict
        for verdict in verdicts
        if verdict.kind != "none" and verdict.kind not in FLEETING and verdict.counts
    ]
    hits = sum(verdict.hit for verdict in counted)
    clean_steps = sum(verdict.clean_steps for verdict in verdicts)
    clean_alarms = sum(len(verdict.clean_alarms) for verdict in verdicts)
    clean_seconds = sum(verdict.clean_seconds for verdict in verdicts)
    alarms = clean_alarms + sum(len(verdict.other_alarms) for verdict in verdicts)
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
        "top1": _share(
            sum(verdict.top1 for verdict in counted), sum(verdict.detected for verdict in counted)
        ),
        "cause_accuracy": _causes(counted),
        "headline_accuracy": _headlines(counted),
        "clean_hours": round(clean_seconds / 3600, 4) if clean_seconds else None,
        "warnings_per_10_hours": (
            round(clean_alarms / clean_seconds * 36_000, 2) if clean_seconds else None
        ),
        "criticals": sum(verdict.clean_criticals for verdict in verdicts),
        "faults": len(counted),
        "ci95": wilson(hits, len(counted)),
    }


def _kind_figures(verdicts: Sequence[TrialVerdict]) -> dict[str, object]:
    counted = [verdict for verdict in verdicts if verdict.counts and verdict.kind != "none"]
    weak = [verdict for verdict in verdicts if not verdict.counts]
    hits = sum(verdict.hit for verdict in counted)
    steps = [verdict.latency_steps for verdict in counted if verdict.latency_steps is not None]
    seconds = [
        verdict.latency_seconds for verdict in counted if verdict.latency_seconds is not None
    ]
    result: dict[str, object] = {
        "n": len(verdicts) - len(weak),
        "recall": _share(hits, len(counted)),
        "top1": _share(
            sum(verdict.top1 for verdict in counted), sum(verdict.detected for verdict in counted)
        ),
        "cause_accuracy": _causes(counted),
        "headline_accuracy": _headlines(counted),
        "latency_steps_p50": _percentile(steps, 50),
        "latency_steps_p90": _percentile(steps, 90),
        "ci95": wilson(hits, len(counted)),
        "latency_seconds_p50": _percentile(seconds, 50),
        "latency_seconds_p90": _percentile(seconds, 90),
        "false_alarms": sum(
            len(verdict.clean_alarms) + len(verdict.other_alarms) for verdict in verdicts
        ),
    }
    if weak:
        result["weak"] = {"n": len(weak), "recall": _share(sum(w.hit for w in weak), len(weak))}
    return result


def _causes(verdicts: Sequence[TrialVerdict]) -> float | None:
    scored = [verdict.cause_correct for verdict in verdicts if verdict.cause_correct is not None]
    return _share(sum(scored), len(scored))


def _headlines(verdicts: Sequence[TrialVerdict]) -> float | None:
    scored = [one.headline_correct for one in verdicts if one.headline_correct is not None]
    return _share(sum(scored), len(scored))


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
