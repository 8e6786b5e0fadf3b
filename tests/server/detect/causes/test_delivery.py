"""Samples that arrive late, twice, out of order, with a wrong clock, or never."""

from __future__ import annotations

import random

import pytest
from measured_fleet import SECOND_NS, START_NS, Fleet, once, since_onset, times
from sicknesses import (
    GPU,
    IB,
    NODE,
    PORT,
    REASON,
    cable,
    contention,
    thermal,
)

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.observation import LiveRank
from paceline_wire.batch import RankState, Sample
from paceline_wire.ring import StateView


def throttled(seed: int, slowdown: float = 1.6, **fleet: object) -> Fleet:
    found = Fleet(seed=seed, **fleet)  # type: ignore[arg-type]
    thermal(found, random.Random(seed), slowdown)
    return found


def test_reordered_and_repeated_samples_change_nothing():
    fleet = throttled(1)
    samples = fleet.samples(75)
    chance = random.Random(1)
    shuffled = sorted(
        [*samples, *chance.sample(samples, len(samples) // 10)],
        key=lambda each: each[1].time_ns + chance.uniform(0, 4) * SECOND_NS,
    )
    for node, sample in shuffled:
        fleet.telemetry.add(node, sample)
    found = fleet.diagnose(slowdown=1.6)
    assert found.cause == "thermal throttle"
    assert found.causes[0].likelihood > 0.9


def test_a_third_of_the_samples_is_enough():
    fleet = throttled(2)
    chance = random.Random(2)
    for node, sample in fleet.samples(75):
        if chance.random() < 1 / 3:
            fleet.telemetry.add(node, sample)
    assert fleet.diagnose(slowdown=1.6).cause == "thermal throttle"


def test_without_samples_since_the_onset_no_cause_is_named():
    """Old values look healthy, because they were measured before the onset."""
    fleet = throttled(3)
    samples = fleet.samples(75)
    for node, sample in samples:
        if sample.time_ns < START_NS + 60 * SECOND_NS:
            fleet.telemetry.add(node, sample)
    found = fleet.diagnose(slowdown=1.6)
    assert found.cause == UNKNOWN
    assert "clock" not in found.ruled_out
    assert "clock" in found.not_measured
    for node, sample in samples:
        if sample.time_ns >= START_NS + 60 * SECOND_NS:
            fleet.telemetry.add(node, sample)
    assert fleet.diagnose(slowdown=1.6).cause == "thermal throttle"


def test_a_node_without_samples_rules_nothing_out():
    fleet = throttled(4, silent={NODE})
    fleet.play(75)
    found = fleet.diagnose()
    assert (found.cause, found.ruled_out) == (UNKNOWN, [])
    assert found.causes == []
    [against] = found.counter_evidence
    assert against.text.startswith("not measured: thermal throttle, power throttle, ")
    assert {"thermal throttle", "clock", "CPU contention"} <= set(found.not_measured)


def test_without_peers_the_own_past_is_compared():
    fleet = throttled(5, silent={"node-0", "node-2", "node-3"})
    fleet.play(75)
    assert fleet.diagnose(slowdown=1.6).cause == "thermal throttle"


def test_what_no_agent_measures_is_listed_as_not_measured():
    fleet = Fleet(seed=6, absent={"DCGM_FI_DEV_SM_CLOCK", REASON, "DCGM_FI_DEV_GPU_TEMP"})
    fleet.absent |= {"DCGM_FI_DEV_THERMAL_VIOLATION", "DCGM_FI_DEV_POWER_VIOLATION"}
    fleet.play(75)
    found = fleet.diagnose()
    assert {"clock", "thermal throttle", "power throttle"} <= set(found.not_measured)
    assert not {"clock", "thermal throttle"} & set(found.ruled_out)
    assert "PCIe" in found.ruled_out


@pytest.mark.parametrize("skew", [-1.9, 1.9])
def test_a_clock_that_is_off_by_what_is_not_corrected(skew):
    fleet = throttled(7, skew_seconds={NODE: skew})
    fleet.play(75)
    assert fleet.diagnose(slowdown=1.6).cause == "thermal throttle"


def test_a_rank_that_was_slow_from_the_start_is_compared_with_its_peers():
    fleet = Fleet(seed=8, onset_seconds=4)
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", GPU, times(0.7, begins=-100))
    fleet.play(60)
    found = fleet.diagnose(slowdown=1 / 0.7, onset_step=None)
    assert found.cause == "low SM clock"
    assert "; peers: " in found.evidence[0].text


@pytest.mark.parametrize(("ranks", "cause"), [(2, UNKNOWN), (1, "CPU contention")])
def test_what_the_whole_node_always_showed_explains_no_rank_that_has_neighbors(ranks, cause):
    """A single node on which tasks always wait for CPUs: nothing can be compared."""
    fleet = Fleet(seed=8, nodes=1, gpus=ranks, onset_seconds=4)
    metric = "node_pressure_cpu_waiting_seconds_total"
    fleet.fault("node-0", metric, "", lambda _seconds, _healthy: 1.0)
    fleet.absent |= {
        "paceline_rank_process_run_queue_wait_seconds_total",
        "paceline_rank_process_context_switches_total",
    }
    fleet.play(60)
    found = fleet.diagnose(rank=0, kind="slow_data", slowdown=2.0, onset_step=None)
    assert found.cause == cause


@pytest.mark.parametrize(("wait", "cause"), [(0.33, UNKNOWN), (0.45, "CPU contention")])
def test_waits_for_cpus_that_grow_with_the_work_of_a_rank_explain_nothing(wait, cause):
    """All ranks of a busy node wait 0.4 s for each second that they run, and rank 0 runs longer."""
    waits = "paceline_rank_process_run_queue_wait_seconds_total"
    used = "paceline_rank_process_cpu_seconds_total"
    fleet = Fleet(seed=8, nodes=1, gpus=3)
    for rank in ("0", "1", "2"):
        fleet.fault("node-0", waits, rank, lambda _seconds, _healthy: 0.2)
        fleet.fault("node-0", used, rank, lambda _seconds, _healthy: 0.5)
    fleet.fault("node-0", waits, "0", lambda after, _healthy: wait if after >= 0 else 0.2)
    computed = 0.8 if cause == UNKNOWN else 0.5
    fleet.fault("node-0", used, "0", lambda after, _healthy: computed if after >= 0 else 0.5)
    fleet.play(90)
    found = fleet.diagnose(rank=0, slowdown=1.3)
    assert found.cause == cause
    text = " ".join(line.text for line in found.counter_evidence)
    assert ("in proportion to its CPU time" in text) == (cause == UNKNOWN)


@pytest.mark.parametrize("onset_step", [60, None], ids=["later", "from the first step on"])
@pytest.mark.parametrize(("own", "cause"), [(0.58, UNKNOWN), (0.36, "CPU contention")])
def test_a_rank_that_needs_more_cpu_time_per_step_computes_more(own, cause, onset_step):
    """Each rank computed for 0.6 s of each second. Steps of 1.7x the length leave 0.36 s."""
    fleet = Fleet(seed=8, nodes=1, gpus=3, onset_seconds=60.0 if onset_step else 0.0)
    for rank, computes, waits in (("0", own, 0.45), ("1", 0.36, 0.1), ("2", 0.36, 0.1)):
        for metric, value in (
            ("cpu_seconds_total", computes),
            ("run_queue_wait_seconds_total", waits),
            ("context_switches_total", 2000 * waits),
        ):
            fleet.fault("node-0", f"paceline_rank_process_{metric}", rank, since_onset(value))
    fleet.play(90)
    found = fleet.diagnose(rank=0, slowdown=1.8, onset_step=onset_step)
    assert found.cause == cause
    text = " ".join(line.text for line in found.counter_evidence)
    assert ("it computes more" in text) == (cause == UNKNOWN)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (0.33, "0.33 CPUs since it became slow, 0.6 before: it does not compute more, but waits"),
        (0.75, "rank 0 needs 2.27x the CPU time for a step, compared with its peers: it computes"),
        (0.45, ""),
    ],
)
def test_a_slow_rank_of_unknown_cause_waits_or_computes(own, text):
    """Each rank computed for 0.6 s of each second, until steps took 1.8x as long."""
    fleet = Fleet(seed=8, nodes=1, gpus=3)
    for rank, later in (("0", own), ("1", 0.33), ("2", 0.33)):
        metric = "paceline_rank_process_cpu_seconds_total"
        fleet.fault("node-0", metric, rank, lambda at, _, later=later: later if at >= 0 else 0.6)
    fleet.play(90)
    found = fleet.diagnose(rank=0, slowdown=2.25)
    assert found.cause == UNKNOWN
    shown = " ".join(line.text for line in found.evidence if "CPU" in line.text)
    assert text in shown if text else not shown


def test_contention_is_shown_with_the_process_that_competes():
    fleet = Fleet(seed=3)
    contention(fleet, random.Random(3), 1.6)
    fleet.play(80)
    for second in range(62, 80, 2):
        at_ns = START_NS + second * SECOND_NS
        for name, value in (("cpus", 0.97), ("pid", 4312.0)):
            sample = Sample(
                f"paceline_other_processes_{name}", {"command": "stress-ng"}, value, at_ns
            )
            fleet.telemetry.add(NODE, sample)
    found = fleet.diagnose(slowdown=1.6)
    assert found.cause == "CPU contention"
    text = f"`stress-ng` (PID 4312) of {NODE}, which belongs to no rank, uses 0.97 CPUs"
    assert text in [line.text for line in found.evidence]
    assert found.causes[0].evidence[-1].text == text


def test_a_rank_that_loses_half_of_its_cpu_on_a_node_that_was_busy_before_waits_for_cpus():
    """Ranks wait 76% of the time for a CPU, and rank 0 then 88%, which leaves it half as much."""
    fleet = Fleet(seed=8, nodes=1, gpus=3)
    for metric, before, after in (("run_queue_wait", 0.76, 0.88), ("cpu", 0.24, 0.12)):
        name = f"paceline_rank_process_{metric}_seconds_total"
        for rank in ("1", "2"):
            fleet.fault("node-0", name, rank, lambda _seconds, _healthy, value=before: value)
        fleet.fault("node-0", name, "0", lambda at, _, values=(before, after): values[at >= 0])
    fleet.play(90)
    assert fleet.diagnose(rank=0, slowdown=2.5, own_share=0.34).cause == "CPU contention"


def test_waits_for_cpus_while_the_ranks_import_their_modules_are_no_past_to_compare_with():
    """Ranks import for 48 s and train for 12 s; then other programs take the CPU of rank 0."""
    fleet = Fleet(seed=8, nodes=1, gpus=3, steps=27)
    for metric, imports, trains, peers, slow in (
        ("run_queue_wait", 0.9, 0.65, 0.22, 0.87),
        ("cpu", 0.1, 0.105, 0.042, 0.045),
    ):
        for rank in "012":
            later = slow if rank == "0" else peers
            values = (imports, trains, later)
            fleet.fault(
                "node-0",
                f"paceline_rank_process_{metric}_seconds_total",
                rank,
                lambda at, _, values=values: values[(at >= -12) + (at >= 0)],
            )
    fleet.play(90)
    found = fleet.diagnose(rank=0, onset_step=12, slowdown=3.1, own_share=0.28)
    assert found.cause == "CPU contention"


def test_a_rank_without_a_node_or_telemetry_is_unknown():
    fleet = Fleet(seed=9)
    assert fleet.diagnose(rank=99).cause == UNKNOWN
    assert fleet.diagnose(rank=2).not_measured


def test_a_whole_node_is_named_by_what_all_its_gpus_show():
    fleet = Fleet(seed=10, gpus=4)
    for gpu in "0123":
        fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", gpu, times(0.6))
        fleet.fault(NODE, REASON, f"{gpu}/hw_thermal_slowdown", since_onset(1.0))
    fleet.play(72)
    found = fleet.diagnose(rank=None, node=NODE, slowdown=1 / 0.6)
    assert found.cause == "thermal throttle"
    fleet = Fleet(seed=10, gpus=4)
    fleet.fault(NODE, "DCGM_FI_DEV_SM_CLOCK", "0", times(0.6))
    fleet.play(72)
    assert fleet.diagnose(rank=None, node=NODE, slowdown=1 / 0.6).cause == UNKNOWN


def test_the_faulty_end_of_a_link_is_named():
    for rank, peer in ((0, 2), (2, 0)):
        fleet = Fleet(seed=11)
        cable(fleet, random.Random(11), 1.5)
        fleet.play(80)
        found = fleet.diagnose(rank=rank, peer=peer, kind="slow_link", slowdown=None)
        assert (found.cause, found.rank) == ("link errors", 2)
        assert any("node-0" in line.text for line in found.counter_evidence)


def test_contention_that_ended_before_is_not_the_cause():
    fleet = Fleet(seed=12)
    pressure = "node_pressure_cpu_waiting_seconds_total"
    fleet.fault(NODE, pressure, "", lambda after, healthy: 0.9 if -40 < after < -20 else healthy)
    fleet.play(75)
    assert fleet.diagnose().cause == UNKNOWN


def test_contention_that_came_minutes_later_is_not_the_cause():
    fleet = Fleet(seed=13)
    contention_later = Fleet(seed=13)
    contention(contention_later, random.Random(13), 1.5)
    for key, fault in contention_later.sick.items():
        fleet.sick[key] = lambda after, healthy, fault=fault: fault(after - 40, healthy)
    fleet.play(120)
    found = fleet.diagnose()
    assert found.cause == UNKNOWN
    assert any("after it became slow" in line.text for line in found.evidence) or found.causes


def test_a_counter_reset_is_not_growth():
    fleet = Fleet(seed=14)
    fleet.play(58)
    for at in (61, 66, 71):
        time_ns = START_NS + at * SECOND_NS
        for name in (f"{IB}symbol_error_total", f"{IB}link_downed_total"):
            labels = {"device": PORT, "port": "1"}
            fleet.telemetry.add(NODE, Sample(name, labels, 0.0, time_ns))
    assert fleet.diagnose(kind="slow_link").cause == UNKNOWN


def test_a_saturated_counter_is_ignored():
    """`link_downed` stops at 255: its lack of growth is no evidence."""
    fleet = Fleet(seed=15, ports=1)
    fleet.absent |= {f"{IB}state_id", "node_network_carrier"}
    fleet.fault(NODE, f"{IB}link_downed_total", PORT, once(5000, -300, 1))
    for node, sample in fleet.samples(75):
        if sample.name == f"{IB}link_downed_total":
            sample = Sample(
                sample.name, sample.labels, min(sample.value + 255, 255.0), sample.time_ns
            )
        fleet.telemetry.add(node, sample)
    found = fleet.diagnose(kind="slow_link")
    assert "link state" in found.not_measured


def xid(fleet: Fleet, number: str, at_seconds: float) -> None:
    for after in (0.0, 1.0, 2.0):
        time_ns = START_NS + round((at_seconds + after) * SECOND_NS)
        labels = {"gpu": GPU, "UUID": "GPU-1-0", "xid": number}
        fleet.telemetry.add(NODE, Sample("DCGM_EXP_XID_ERRORS_COUNT", labels, 1.0, time_ns))


@pytest.mark.parametrize(
    ("number", "at_seconds", "cause"),
    [("79", 60.5, "GPU error (XID)"), ("79", 5.0, UNKNOWN)],
)
def test_an_xid_counts_if_it_occurred_at_the_onset(number, at_seconds, cause):
    fleet = Fleet(seed=16)
    fleet.play(70)
    xid(fleet, number, at_seconds)
    assert fleet.diagnose(kind="hang", slowdown=None).cause == cause


def test_an_xid_in_the_first_sample_of_a_gpu_is_old():
    """A worker that took over the job knows only the count, not the times."""
    fleet = Fleet(seed=17, absent={"paceline_gpu_lost"})
    for node, sample in fleet.samples(70):
        if sample.time_ns >= START_NS + 59 * SECOND_NS:
            fleet.telemetry.add(node, sample)
    lost = Sample("paceline_gpu_lost", {"gpu": GPU}, 0.0, START_NS + 60 * SECOND_NS)
    fleet.telemetry.add(NODE, lost)
    xid(fleet, "79", 60.0)
    assert fleet.diagnose(kind="hang", slowdown=None).cause == UNKNOWN


def test_a_lost_gpu_explains_a_hang():
    fleet = Fleet(seed=18)
    fleet.fault(NODE, "paceline_gpu_lost", GPU, since_onset(1.0))
    fleet.play(66)
    found = fleet.diagnose(kind="hang", slowdown=None)
    assert (found.cause, found.on_node) == ("GPU lost", True)


def process(letter: str) -> LiveRank:
    view = StateView(
        head=0, step=1, step_started_ns=0, microbatch=None, status="running", loss_step=None,
        loss=None, gradient_norm=None, evaluation_step=None, evaluation_loss=None,
        frames=[], groups=[], peers=[],
    )  # fmt: skip
    state = RankState(
        time_ns=1, job="job", generation=0, rank=2, clock_offset_ns=0, view=view,
        process_state=letter,
    )  # fmt: skip
    return LiveRank(2, state)


def test_a_process_in_uninterruptible_io():
    fleet = Fleet(seed=19)
    fleet.play(66)
    fleet.states[2] = process("D")
    assert fleet.diagnose(kind="hang", slowdown=None).cause == "blocked on I/O"
    fleet.states[2] = process("S")
    assert fleet.diagnose(kind="hang", slowdown=None).cause == UNKNOWN
