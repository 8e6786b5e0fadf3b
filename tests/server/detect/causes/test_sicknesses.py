"""The cause of a faulty node is named despite distractors, and no cause on a healthy node."""

from __future__ import annotations

import random
import zlib
from collections import Counter

import pytest
from measured_fleet import Fault, Fleet, since_onset
from sicknesses import (
    DISTRACTORS,
    GPU,
    NODE,
    REASON,
    SICKNESSES,
    Sickness,
    small_drop,
    thermal,
)

from paceline_server.detect.causes.catalog import CAUSES, UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.reporting import because

KINDS = sorted({kind for info in CAUSES.values() for kind in info.priors})


def sick(sickness: Sickness, seed: int, distractors: int = 3) -> Diagnosis:
    chance = random.Random(seed + zlib.crc32(f"{sickness.cause} {sickness.kind}".encode()))
    slowdown = chance.uniform(1.1, 2.5)
    fleet = Fleet(seed=seed)
    for distract in chance.sample(DISTRACTORS, distractors):
        distract(fleet, chance)
    sickness.make(fleet, chance, slowdown)
    fleet.play(fleet.onset_seconds + sickness.seconds)
    return fleet.diagnose(kind=sickness.kind, slowdown=slowdown)


def healthy(kind: str, seed: int) -> Diagnosis:
    chance = random.Random(seed)
    fleet = Fleet(seed=seed)
    for distract in chance.sample(DISTRACTORS, 3):
        distract(fleet, chance)
    fleet.play(fleet.onset_seconds + 15)
    return fleet.diagnose(kind=kind, slowdown=chance.uniform(1.1, 2.5))


@pytest.mark.parametrize("sickness", SICKNESSES, ids=lambda each: f"{each.cause}-{each.kind}")
def test_each_cause_is_named_among_distractors(sickness):
    found = sick(sickness, seed=1)
    assert found.cause == sickness.cause
    assert found.on_node == CAUSES[sickness.cause].on_node
    assert found.causes[0].name == sickness.cause
    assert found.causes[0].likelihood > 0.5
    assert sum(each.likelihood for each in found.causes) <= 1.0
    assert found.causes[0].evidence
    assert all(line.text and line.metric for line in found.causes[0].evidence)


@pytest.mark.parametrize("kind", KINDS)
def test_distractors_alone_explain_nothing(kind):
    found = healthy(kind, seed=2)
    assert found.cause == UNKNOWN
    assert not found.on_node
    assert found.ruled_out
    assert because(found) == "cause unknown", "what it is not is evidence, and no headline"
    assert found.counter_evidence


def test_ruled_out_causes_are_shown_with_numbers():
    fleet = Fleet(seed=3)
    fleet.play(75)
    found = fleet.diagnose()
    expected = {"thermal throttle", "clock", "PCIe", "ECC", "XID", "memory pressure", "disk"}
    assert expected <= set(found.ruled_out)
    against = " ".join(line.text for line in found.counter_evidence)
    assert "the PCIe width of gpu0 of node-1 is normal: 16 lanes" in against
    assert "gpu0 of node-1: 0 new uncorrectable ECC errors" in against


def test_a_lower_clock_explains_a_slowdown_of_the_same_ratio():
    fleet = Fleet(seed=4)
    thermal(fleet, random.Random(4), 1980 / 795)
    fleet.play(70)
    found = fleet.diagnose(slowdown=2.5)
    assert found.cause == "thermal throttle"
    assert found.causes[0].likelihood > 0.95
    assert any("explains 2.4" in line.text for line in found.evidence)


@pytest.mark.parametrize("spells", [[(-16, -5)], [(-30, -20), (-15, -5)]], ids=len)
def test_a_throttle_that_comes_and_goes_began_with_its_newest_spell(spells):
    def recurs(sick: float) -> Fault:
        return lambda after, usual: (
            sick if after >= 0 or any(a <= after < b for a, b in spells) else usual
        )

    fleet = Fleet(seed=4)
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", GPU, recurs(1345.0))
    fleet.fault(NODE, "DCGM_FI_DEV_GPU_TEMP", GPU, recurs(92.0))
    fleet.fault(NODE, REASON, f"{GPU}/hw_thermal_slowdown", recurs(1.0))
    fleet.play(fleet.onset_seconds + 8)
    found = fleet.diagnose(slowdown=1.46)
    assert found.cause == "thermal throttle"
    assert not [line.text for line in found.evidence if "before the slowdown" in line.text]


def test_a_slightly_lower_clock_does_not_explain_a_large_slowdown():
    fleet = Fleet(seed=5)
    small_drop(fleet, random.Random(5))
    fleet.play(75)
    assert fleet.diagnose(slowdown=1.4).cause == UNKNOWN
    fleet = Fleet(seed=5)
    fleet.fault(
        "node-1", "DCGM_FI_DEV_SM_CLOCK", "0", lambda after, mhz: mhz * (1 - 0.1 * (after > 0))
    )
    fleet.play(75)
    assert fleet.diagnose(slowdown=1.11).cause == "low SM clock"
    assert fleet.diagnose(slowdown=2.5).cause == UNKNOWN


@pytest.mark.parametrize(
    ("kind", "metric", "rate"),
    [
        ("straggler", "node_pressure_cpu_waiting_seconds_total", 0.6),
        ("slow_link", "node_netstat_Tcp_RetransSegs", 400.0),
    ],
)
def test_another_program_on_the_node_explains_nothing(kind, metric, rate):
    """The rank itself waits for no CPU and sends nothing again."""
    fleet = Fleet(seed=7)
    fleet.fault("node-1", metric, "", since_onset(rate))
    fleet.play(90)
    found = fleet.diagnose(kind=kind, slowdown=1.5)
    assert found.cause == UNKNOWN
    assert not found.on_node


@pytest.mark.parametrize(
    ("kind", "against"),
    [
        ("slow_data", "rank 2 and their loader workers read nothing from a disk"),
        ("straggler", "rank 2 read nothing from a disk and write nothing to it"),
    ],
)
def test_a_disk_that_the_rank_does_not_use_explains_nothing(kind, against):
    """Another program keeps the disk busy; the data come from memory."""
    fleet = Fleet(seed=8)
    for metric, value in (("time", 0.97), ("time_weighted", 12.0)):
        fleet.fault("node-1", f"node_disk_io_{metric}_seconds_total", "nvme0n1", since_onset(value))
    for name in ("read", "process_written"):
        fleet.fault("node-1", f"paceline_rank_{name}_bytes_total", "2", lambda after, rate: 0.0)
    fleet.play(90)
    found = fleet.diagnose(kind=kind, slowdown=1.5)
    assert found.cause == UNKNOWN
    assert f"the processes of {against}" in [line.text for line in found.counter_evidence]


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_nine_of_ten_causes_are_right_on_many_seeds():
    right, wrong = 0, Counter()
    for seed in range(100, 115):
        for sickness in SICKNESSES:
            found = sick(sickness, seed).cause
            right += found == sickness.cause
            wrong[sickness.cause, found] += found != sickness.cause
        for kind in KINDS:
            found = healthy(kind, seed).cause
            right += found == UNKNOWN
            wrong[UNKNOWN, found] += found != UNKNOWN
    asked = right + sum(wrong.values())
    assert right / asked >= 0.95, wrong.most_common(5)
