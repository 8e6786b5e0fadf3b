"""Scoring of handwritten findings: detected, late, false alarm."""

from __future__ import annotations

import msgspec
import pytest

from paceline_evaluation.faults import CommonChange, TrialFault
from paceline_evaluation.record import ReportedFinding, TrialRecord
from paceline_evaluation.scoring import TrialVerdict, figures, judge, wilson
from paceline_server.detect.finding import Finding

ONSET = 50
SLOW = TrialFault("slow_rank", ONSET, 0.3, ranks=(3,), node=1, cause="thermal")


def finding(kind: str = "straggler", rank: int | None = 3, **fields: object) -> Finding:
    made = Finding(
        kind=kind,
        cause="thermal throttle",
        fingerprint=f"{kind}:{rank}",
        summary="-",
        detected_ns=0,
        generation=0,
        rank=rank,
        node=None if rank is None else f"node-{rank // 2}",
    )
    return msgspec.structs.replace(made, **fields)


def record(*seen: tuple[int, Finding], faults: tuple[TrialFault, ...] = (SLOW,)) -> TrialRecord:
    made = TrialRecord(faults[0].kind if len(faults) == 1 else "two_faults", faults, steps=80)
    made.onset_seconds = (10.0,) * len(faults)
    made.findings = [ReportedFinding(found, step, step / 4) for step, found in seen]
    return made


def healthy(*seen: tuple[int, Finding]) -> TrialRecord:
    made = TrialRecord("none", (), steps=80)
    made.findings = [ReportedFinding(found, step, step / 4) for step, found in seen]
    return made


def alarms(verdict: TrialVerdict) -> tuple[int, int]:
    return len(verdict.clean_alarms), len(verdict.other_alarms)


def test_the_correct_rank_and_cause_five_steps_after_the_onset_is_a_hit():
    verdict = judge(record((55, finding())))
    assert (verdict.detected, verdict.hit, verdict.top1, verdict.cause_correct) == (True,) * 4
    assert verdict.latency_steps == 5
    assert verdict.latency_seconds == pytest.approx(55 / 4 - 10.0)
    assert alarms(verdict) == (0, 0)
    assert verdict.clean_steps == 45  # all steps before the onset except the warm-up


def test_no_finding_is_a_miss_and_no_alarm():
    verdict = judge(record())
    assert (verdict.detected, verdict.hit, verdict.latency_steps) == (False, False, None)
    assert verdict.cause_correct is None
    assert alarms(verdict) == (0, 0)


def test_a_finding_before_the_onset_is_a_false_alarm_even_for_the_correct_rank():
    verdict = judge(record((49, finding())))
    assert not verdict.hit
    assert alarms(verdict) == (1, 0)


def test_the_wrong_rank_first_costs_top1_and_is_a_false_alarm():
    verdict = judge(record((53, finding(rank=5)), (56, finding())))
    assert (verdict.detected, verdict.hit, verdict.top1) == (True, True, False)
    assert verdict.latency_steps == 6
    assert alarms(verdict) == (0, 1)


def test_a_repeated_or_updated_finding_counts_once():
    better = finding(cause="thermal throttle of gpu1")
    verdict = judge(record((54, finding(rank=5)), (55, finding(rank=5)), (56, better)))
    assert alarms(verdict) == (0, 1)
    assert verdict.hit


def test_an_alarm_that_came_back_after_it_was_cleared_counts_twice():
    other = finding(rank=5)
    gone = msgspec.structs.replace(other, cleared=True)
    assert alarms(judge(healthy((20, other), (30, gone), (40, other)))) == (2, 0)


def test_a_cleared_finding_alone_is_neither_hit_nor_alarm():
    verdict = judge(record((55, finding(cleared=True))))
    assert not verdict.detected
    assert alarms(verdict) == (0, 0)


def test_advice_in_a_healthy_job_is_no_alarm_and_a_warning_is():
    advice = finding("stage_imbalance", None, severity="info")
    assert alarms(judge(healthy((20, advice)))) == (0, 0)
    warning = finding("stage_imbalance", None)
    assert alarms(judge(healthy((20, warning)))) == (1, 0)


def test_information_that_becomes_a_warning_is_a_false_alarm_from_then_on():
    advice, warning = finding(rank=5, severity="info"), finding(rank=5)
    assert alarms(judge(healthy((20, advice), (30, warning), (40, warning)))) == (1, 0)
    assert alarms(judge(record((55, advice), (60, warning)))) == (0, 1)
    assert alarms(judge(record((40, advice), (60, warning)))) == (0, 1)


@pytest.mark.parametrize(
    ("onset", "slowdown", "change", "count"),
    [
        (20, 1.18, CommonChange(22, 1.2), 0),
        (20, 1.18, None, 1),
        (20, 1.18, CommonChange(22, 0.8), 1),  # the ranks became faster
        (20, 1.18, CommonChange(60, 1.2), 1),  # at another time
        (20, 1.5, CommonChange(22, 1.2), 1),  # by less
    ],
)
def test_slower_steps_are_correct_where_all_ranks_become_slower(
    onset: int, slowdown: float, change: CommonChange | None, count: int
):
    slower = finding("slower_steps", None, severity="warning", onset_step=onset, slowdown=slowdown)
    job = healthy((70, slower))
    job.change = change
    assert alarms(judge(job)) == (count, 0)


def test_a_straggler_is_a_false_alarm_also_where_all_ranks_become_slower():
    job = healthy((70, finding(onset_step=22, slowdown=1.2)))
    job.change = CommonChange(22, 1.2)
    assert alarms(judge(job)) == (1, 0)


def test_a_bubble_beside_a_slow_rank_is_its_symptom_but_another_kind_is_an_alarm():
    assert alarms(judge(record((55, finding("bubble", None))))) == (0, 0)
    assert alarms(judge(record((55, finding("slow_data"))))) == (0, 1)


def test_the_latest_cause_is_scored_and_unknown_is_correct_without_telemetry():
    first = finding(cause="unknown")
    assert judge(record((55, first), (57, finding()))).cause_correct is True
    assert judge(record((55, finding()), (57, first))).cause_correct is False
    unseen = TrialFault("slow_rank", ONSET, 0.3, ranks=(3,), node=1, cause="unknown")
    assert judge(record((55, first), faults=(unseen,))).cause_correct is True
    assert judge(record((55, finding()), faults=(unseen,))).cause_correct is False


@pytest.mark.parametrize(("kind", "found"), [("hang", "hang"), ("crash", "failure")])
def test_a_hang_or_exit_reported_before_it_happened_is_a_false_alarm(kind: str, found: str):
    fault = TrialFault(kind, ONSET, 1.0, ranks=(3,), node=1, cause="host")
    before = judge(record((20, finding(found)), faults=(fault,)))
    assert (before.hit, alarms(before)) == (False, (1, 0))
    after = judge(record((ONSET - 2, finding(found)), faults=(fault,)))  # after 10 s
    assert (after.hit, alarms(after)) == (True, (0, 0))


def test_two_faults_must_both_be_hits_and_the_larger_latency_counts():
    data = TrialFault("data_stall", ONSET + 2, 0.3, ranks=(6,), node=3, cause="disk")
    slow = finding("slow_data", 6, cause="slow disk")
    both = judge(record((54, finding()), (59, slow), faults=(SLOW, data)))
    assert (both.hit, both.latency_steps, alarms(both)) == (True, 7, (0, 0))
    one = judge(record((54, finding()), faults=(SLOW, data)))
    assert (one.hit, one.detected, alarms(one)) == (False, False, (0, 0))


def test_the_finding_of_one_slow_rank_is_no_hit_for_the_other():
    other = TrialFault("slow_rank", ONSET, 0.3, ranks=(6,), node=3, cause="unknown")
    verdict = judge(record((54, finding()), faults=(SLOW, other)))
    assert (verdict.hit, alarms(verdict)) == (False, (0, 0))


@pytest.mark.parametrize(
    ("found", "hit"),
    [
        (finding(rank=None, node="node-1", ranks=[2, 3]), True),
        (finding(rank=2), True),  # one of the node's ranks
        (finding(rank=None, node="node-1", ranks=[2, 3, 4]), False),
        (finding(rank=None, node="node-2", ranks=[4, 5]), False),
    ],
)
def test_a_slow_node_may_be_reported_as_node_or_as_its_ranks(found: Finding, hit: bool):
    fault = TrialFault("slow_node", ONSET, 0.3, ranks=(2, 3), node=1)
    assert judge(record((55, found), faults=(fault,))).hit is hit


def test_a_link_has_two_ends_in_any_order():
    fault = TrialFault("slow_link", ONSET, 0.3, link=(1, 5), node=0)
    one = finding("slow_link", None, link=(5, 1))
    assert judge(record((55, one), faults=(fault,))).hit
    wrong = judge(record((55, finding("slow_link", None, link=(1, 4))), faults=(fault,)))
    assert (wrong.detected, wrong.hit, alarms(wrong)) == (True, False, (0, 1))


@pytest.mark.parametrize(
    ("cause", "reported", "correct"),
    [
        ("nic errors", "link errors", True),
        ("nic errors", "low link rate", False),
        ("nic errors", "degraded PCIe link of the NIC", False),
        ("nic rate", "low link rate", True),
        ("nic rate", "NIC error", False),
    ],
)
def test_another_cause_of_a_slow_link_is_not_correct(cause: str, reported: str, correct: bool):
    fault = TrialFault("slow_link", ONSET, 0.3, link=(1, 5), node=0, cause=cause)
    found = finding("slow_link", None, link=(1, 5), cause=reported)
    assert judge(record((55, found), faults=(fault,))).cause_correct is correct


@pytest.mark.parametrize(
    ("found", "hit"),
    [
        (finding("slow_link", None, link=(1, 2), ranks=[1, 2]), True),
        (finding("slow_link", None, ranks=[0, 1], node="node-0"), True),
        (finding("slow_link", None, link=(0, 1), ranks=[0, 1], node="node-0"), False),
    ],
)
def test_a_link_within_a_node_is_not_the_network_of_the_node(found: Finding, hit: bool):
    fault = TrialFault("slow_link", ONSET, 0.5, ranks=(0, 1, 2, 3), node=0, way="rate_limit")
    assert judge(record((55, found), faults=(fault,))).hit is hit


def test_a_weak_fault_is_no_miss_and_a_finding_of_its_rank_no_alarm():
    weak = TrialFault("slow_rank", ONSET, 0.06, ranks=(3,), node=1)
    found = judge(record((60, finding()), faults=(weak,)))
    missed = judge(record(faults=(weak,)))
    result = figures([found, missed], ["slow_rank"])
    kind = result["by_kind"]["slow_rank"]  # type: ignore[index]
    assert (kind["n"], kind["recall"], kind["weak"]) == (0, None, {"n": 2, "recall": 0.5})
    assert result["overall"]["false_alarms"] == 0  # type: ignore[index]


def test_figures_of_a_campaign():
    verdicts = [
        judge(record((55, finding()))),
        judge(record()),
        judge(record((53, finding(rank=5)), (58, finding()))),
        judge(healthy()),
    ]
    result = figures(verdicts, ["none", "slow_rank"])
    overall, kind = result["overall"], result["by_kind"]["slow_rank"]  # type: ignore[index]
    assert overall["precision"] == pytest.approx(2 / 3, abs=1e-3)
    assert overall["recall"] == pytest.approx(2 / 3, abs=1e-3)
    assert overall["f1"] == pytest.approx(2 / 3, abs=1e-3)
    assert overall["clean_steps"] == 3 * 45 + 75
    assert overall["false_alarms_per_10k_steps"] == 0.0
    assert (kind["n"], kind["top1"], kind["latency_steps_p50"]) == (3, 0.5, 6.5)
    assert result["by_kind"]["none"]["recall"] is None  # type: ignore[index]


def test_a_transient_fault_is_not_in_the_overall_figures_but_its_alarms_are():
    stall = TrialFault("transient_stall", ONSET, 2.0, steps=2, ranks=(3,), node=1)
    verdict = judge(record((52, finding()), faults=(stall,)))  # counted as one that lasts
    overall = figures([verdict], ["transient_stall"])["overall"]
    assert overall["faults"] == 0  # type: ignore[index]
    assert overall["false_alarms"] == 1  # type: ignore[index]


def test_figures_of_no_trials_are_unknown():
    result = figures([], ["gc"])
    assert result["overall"]["f1"] is None  # type: ignore[index]
    assert result["by_kind"]["gc"] == {  # type: ignore[index]
        "n": 0,
        "recall": None,
        "top1": None,
        "cause_accuracy": None,
        "headline_accuracy": None,
        "latency_steps_p50": None,
        "latency_steps_p90": None,
        "ci95": None,
        "latency_seconds_p50": None,
        "latency_seconds_p90": None,
        "false_alarms": 0,
    }


def test_wilsons_interval():
    assert wilson(0, 0) is None
    assert wilson(10, 10) == [pytest.approx(0.7225, abs=1e-3), 1.0]
    assert wilson(8, 10) == [pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3)]
