"""Checkpoints that delay training."""

import dataclasses

import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.checkpoint_stall.detector import CheckpointStallDetector
from paceline_server.detect.host_load import WAIT
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(4, 2, 1), one_forward_one_backward(2, 8), jitter=0.03)
EVERYONE = range(8)


def played(seconds_of, checkpoints=6, every=20):
    """Play a job; `seconds_of(checkpoint)` returns the seconds of each rank."""
    steps = []
    for step in range(checkpoints * every + 5):
        due = step % every == every - 1
        seconds = seconds_of(step // every) if due else {}
        steps.append(dataclasses.replace(JOB, checkpoint=seconds).play(step))
    return steps


def test_ordinary_checkpoints_are_healthy():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda number: dict.fromkeys(EVERYONE, 0.3 + 0.05 * (number % 3))))
    assert watched.findings == []


def test_a_node_that_writes_slowly_is_named():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    slow = {4: 1.2, 5: 1.3}
    watched.show(
        played(lambda number: {**dict.fromkeys(EVERYONE, 0.2), **(slow if number > 2 else {})})
    )
    found = watched.findings[0]
    assert (found.kind, found.rank, found.node, found.ranks) == (
        "checkpoint_stall",
        5,
        "node-2",
        [4, 5],
    )
    assert found.step == 4 * 20 + 19
    assert "async_save" in found.advice


def test_one_rank_that_writes_the_model_is_no_slow_node():
    """As in data-parallel training with Hugging Face: the others write only their random state."""
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda _: {**dict.fromkeys(EVERYONE, 0.01), 0: 0.7}))
    assert watched.findings == []


def test_one_rank_that_writes_the_model_may_become_slow():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(
        played(lambda number: {**dict.fromkeys(EVERYONE, 0.01), 0: 0.3 if number < 3 else 1.4})
    )
    [found] = watched.findings
    assert (found.rank, found.cause) == (0, "slow storage of the node")
    assert "takes 1.4 s to write its checkpoint, instead of 300 ms: this costs" in found.summary


def test_ranks_of_a_slow_node_are_one_finding_whichever_takes_longest():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    pairs = [{4: 1.2, 5: 1.3}, {4: 1.3, 5: 1.2}]
    watched.show(
        played(
            lambda number: {
                **dict.fromkeys(EVERYONE, 0.2),
                **(pairs[number % 2] if number > 2 else {}),
            },
            checkpoints=10,
        )
    )
    [found] = watched.findings
    assert found.fingerprint == "checkpoint_stall:node-2"


@pytest.mark.parametrize("slow", [EVERYONE, (4, 5)])
def test_a_slow_storage_is_reported_as_long_as_it_is_slow(slow):
    watched = Watched(CheckpointStallDetector, JOB.topology)
    steps = played(
        lambda number: {
            **dict.fromkeys(EVERYONE, 0.2),
            **(dict.fromkeys(slow, 0.7) if 4 <= number < 20 else {}),
        },
        checkpoints=24,
    )
    _, over = watched.show(steps)
    assert over.cleared
    assert over.detected_ns > int(steps[20 * 20].ranks.end_ns.max())


def test_a_storage_that_becomes_slow_replaces_the_advice():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda number: dict.fromkeys(EVERYONE, 0.9 if number < 6 else 3.0), 9, 10))
    advice, slow = watched.findings
    assert (advice.cause, advice.severity) == ("blocking checkpoints", "info")
    assert (slow.cause, slow.severity) == ("slow storage", "warning")
    assert slow.fingerprint == advice.fingerprint


def test_storage_that_becomes_slow_is_reported():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda number: dict.fromkeys(EVERYONE, 0.2 if number < 4 else 0.7)))
    [found] = watched.findings
    assert (found.rank, found.cause) == (None, "slow storage")


def test_a_small_copy_that_busy_cpus_delay_is_no_slow_storage():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda number: dict.fromkeys(EVERYONE, 0.02 if number < 4 else 0.24)))
    assert watched.findings == []


def show_with_waits(watched, steps, busy_from):
    """Show steps in which ranks wait for a CPU for 5% of the time, and for 60% from a step on."""
    waited = 0.0
    for number, step in enumerate(steps):
        waited += 10.0 * (0.6 if number >= busy_from else 0.05)
        for rank in EVERYONE:
            labels, node = {"job": "job", "rank": str(rank)}, watched.generation.node(rank)
            sample = Sample(WAIT, labels, waited, int(step.ranks.start_ns.min()))
            watched.telemetry.add(node, sample)
        watched.show([step])


@pytest.mark.parametrize(("seconds", "found"), [(0.7, 0), (3.0, 1)])
def test_busy_cpus_may_delay_checkpoints(seconds, found):
    watched = Watched(CheckpointStallDetector, JOB.topology)
    steps = played(lambda number: dict.fromkeys(EVERYONE, 0.2 if number < 4 else seconds))
    show_with_waits(watched, steps, busy_from=90)
    assert len(watched.findings) == found


def test_one_writer_that_busy_cpus_delay_is_no_slow_node():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    steps = played(lambda number: {**dict.fromkeys(EVERYONE, 0.01), 0: 0.3 if number < 3 else 1.2})
    show_with_waits(watched, steps, busy_from=70)
    assert watched.findings == []


def test_a_slow_storage_is_not_over_when_the_cpus_become_busy():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    steps = played(lambda number: dict.fromkeys(EVERYONE, 0.2 if number < 4 else 0.7), 12)
    show_with_waits(watched, steps, busy_from=130)
    [found] = watched.findings
    assert found.cause == "slow storage"


def test_short_times_are_in_milliseconds():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda number: dict.fromkeys(EVERYONE, 0.04 if number < 4 else 1.5)))
    [found] = watched.findings
    assert found.summary.startswith("Checkpoints take 1.5 s instead of 40 ms: ")


def test_checkpoints_that_take_much_of_the_run_lead_to_advice():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    watched.show(played(lambda _: dict.fromkeys(EVERYONE, 0.9), every=10))
    [found] = watched.findings
    assert (found.cause, found.severity) == ("blocking checkpoints", "info")
    assert found.cost_ratio == pytest.approx(0.9 / (10 * 0.55 + 0.9), rel=0.1)


@pytest.mark.parametrize(("is_readonly", "cause"), [(0, "disk full"), (1, None)])
def test_a_read_only_image_is_no_full_disk(is_readonly, cause):
    watched = Watched(CheckpointStallDetector, JOB.topology)
    slow = {4: 1.2, 5: 1.3}
    steps = played(lambda number: {**dict.fromkeys(EVERYONE, 0.2), **(slow if number > 2 else {})})
    labels = {"mountpoint": "/"}
    for name, value in (("avail_bytes", 0), ("size_bytes", 1e9), ("readonly", is_readonly)):
        sample = Sample(f"node_filesystem_{name}", labels, value, int(steps[90].ranks.end_ns[0]))
        watched.telemetry.add("node-2", sample)
    watched.show(steps)
    names = [each.name for each in watched.findings[0].causes]
    assert names == ([] if cause is None else [cause])


def test_the_disk_of_the_node_that_writes_slowly_is_evidence():
    watched = Watched(CheckpointStallDetector, JOB.topology)
    slow = {4: 1.2, 5: 1.3}
    steps = played(lambda number: {**dict.fromkeys(EVERYONE, 0.2), **(slow if number > 2 else {})})
    for begun_ns, second in [(int(steps[79].ranks.start_ns.min()), one) for one in range(-30, 60)]:
        at_ns = begun_ns + second * 10**9
        read = Sample("paceline_kernel_log_lost_total", {}, 0.0, at_ns)
        watched.telemetry.add("node-2", read)
        if second > 0:
            labels = {"kind": "nvme_timeout", "code": "", "device": "nvme0"}
            sample = Sample("paceline_kernel_events_total", labels, 2.0, at_ns)
            watched.telemetry.add("node-2", sample)
    watched.show(steps)
    found = watched.findings[0]
    assert (found.cause, found.rank) == ("slow storage of the node", 5)
    assert found.causes[0].name == "slow disk"
    assert any("requests that timed out" in line.text for line in found.evidence)
