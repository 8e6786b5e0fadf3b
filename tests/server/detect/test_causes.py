"""The engine determines the cause of a straggler from the measurements of its node."""

import pytest
from simulated_job import SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_wire.batch import Sample


def stragglers(job: SimulatedJob) -> list[Finding]:
    return [found for found in job.findings if found.kind == "straggler"]


def test_a_throttled_gpu_is_named_with_reason_clock_and_temperature():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.5
    job.faults.throttle[2] = "sw_thermal_slowdown"
    job.faults.clock_mhz[2] = 795.0
    job.advance(8)
    found = stragglers(job)[-1]
    assert (found.cause, found.rank, found.node) == ("thermal throttle", 2, "node-1")
    assert found.suspects_node
    assert abs(found.onset_step - 25) <= 1
    texts = " ".join(each.text for each in found.evidence)
    assert "sw_thermal_slowdown" in texts
    assert "from 1980 to 795 MHz" in texts
    assert "92 °C" in texts
    assert "gpu0 of node-1" in texts


def test_the_other_gpu_of_the_node_does_not_explain_it():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.5
    job.faults.throttle[3] = "sw_thermal_slowdown"
    job.faults.clock_mhz[3] = 795.0
    job.advance(8)
    found = stragglers(job)[-1]
    assert (found.rank, found.cause) == (2, "unknown")
    against = " ".join(each.text for each in found.counter_evidence)
    assert "is normal: 1980 MHz" in against
    assert "no throttle reason" in against


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("sw_power_cap", "power throttle"),
        ("hw_slowdown", "hardware slowdown"),
        (None, "low SM clock"),
    ],
)
def test_causes_by_throttle_reason_and_clock(reason, cause):
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.0
    job.faults.clock_mhz[2] = 1000.0
    if reason is not None:
        job.faults.throttle[2] = reason
    job.advance(8)
    assert stragglers(job)[-1].cause == cause


def test_a_cause_whose_samples_come_late_updates_the_finding():
    """The node's samples are delivered late, with their original timestamps."""
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.5
    measured = job.samples
    held: list[Sample] = []
    job.samples = lambda rank: held.extend(measured(rank)) or []
    job.faults.throttle[2] = "hw_thermal_slowdown"
    job.faults.clock_mhz[2] = 795.0
    job.advance(8)
    assert {found.cause for found in stragglers(job)} == {"unknown"}
    job.samples = measured
    for rank in job.ranks:
        own = [each for each in held if each.labels["gpu"] == str(rank % job.ranks_per_node)]
        if rank == 2:
            job.engine.feed(job.batch(job.node(rank), samples=own), job.now_ns)
    job.advance(12)
    first, later = stragglers(job)[0], stragglers(job)[-1]
    assert (first.cause, later.cause) == ("unknown", "thermal throttle")
    assert first.fingerprint == later.fingerprint


def node_sample(job: SimulatedJob, node: str, name: str, value: float, **labels: str) -> None:
    sample = Sample(name, labels, value, job.now_ns)
    job.engine.feed(job.batch(node, samples=[sample]), job.now_ns)


def advance(job: SimulatedJob, steps: int, measure) -> None:
    """Advance the job.

    `measure(node, seconds)` returns (metric, growth, labels) of a counter per step.
    """
    for _ in range(steps):
        before_ns = job.now_ns
        job.advance()
        for node in job.nodes:
            name, grown, labels = measure(node, (job.now_ns - before_ns) / 1e9)
            key = f"{node} {name}"
            job.totals[key] = job.totals.get(key, 0.0) + grown
            node_sample(job, node, name, job.totals[key], **labels)


def test_cpu_contention_on_one_node_only():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.totals = {}
    name = "node_pressure_cpu_waiting_seconds_total"
    advance(job, 25, lambda node, seconds: (name, seconds * 0.05, {}))
    job.faults.slow[2] = 2.0
    sick = {"node-1": 0.9}
    advance(job, 8, lambda node, seconds: (name, seconds * sick.get(node, 0.05), {}))
    assert stragglers(job)[-1].cause == "CPU contention"


def test_corrected_memory_errors():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.totals = {}
    name, gpu = "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", {"gpu": "0"}
    advance(job, 25, lambda node, seconds: (name, 0.0, gpu))
    job.faults.slow[2] = 2.0
    advance(job, 8, lambda node, seconds: (name, 100.0 * (node == "node-1"), gpu))
    assert stragglers(job)[-1].cause == "correctable ECC errors"


def test_a_link_that_trains_down():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.0
    for _ in range(8):
        job.advance()
        for node in job.nodes:
            for gpu in ("0", "1"):
                width = 8.0 if (node, gpu) == ("node-1", "0") else 16.0
                node_sample(job, node, "paceline_gpu_pcie_width", width, gpu=gpu)
    assert stragglers(job)[-1].cause == "degraded PCIe link"


def test_a_rank_bound_to_the_wrong_numa_node_is_no_fault_of_the_node():
    job = SimulatedJob(seed=1, jitter=0.05)
    job.advance(25)
    job.faults.slow[2] = 2.0
    for _ in range(8):
        job.advance()
        node_sample(job, "node-1", "paceline_rank_numa_misbound", 1.0, rank="2")
    found = stragglers(job)[-1]
    assert (found.cause, found.suspects_node) == ("NUMA misbinding", False)
