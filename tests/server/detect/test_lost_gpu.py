"""XIDs and other errors of a GPU, from NVML and the kernel log."""

from __future__ import annotations

import pytest
from simulated_job import JOB, SimulatedJob

from paceline_agent.collect.kernel_log.recognize import Recognizer
from paceline_server.detect.finding import Finding
from paceline_wire.batch import DeviceEvent, Sample

GPU, NODE = "gpu1", "node-1"  # where rank 3 runs
SAYS = {
    48: "48, pid='<unknown>', name=<unknown>, DBE (double bit error) in memory",
    63: "63, pid=4003, name=python, Row Remapper: New row marked for remapping",
    64: "64, pid=4003, name=python, Row Remapper: Error remapping row",
    74: "74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 6",
    79: "79, GPU has fallen off the bus.",
    94: "94, pid=4003, name=python, Contained: SM (0x1). RST: No, D-RST: No",
    95: "95, pid=4003, name=python, Uncontained: LTC TAG",
    119: "119, pid=4003, name=python, Timeout after 6s of waiting for RPC response from GPU1 GSP!",
    120: "120, pid=4003, name=python, GSP task exception",
}


@pytest.fixture
def job() -> SimulatedJob:
    job = SimulatedJob(seed=1)
    job.advance(3)
    return job


def tick(job: SimulatedJob, seconds: float = 0.1) -> list[Finding]:
    job.now_ns += int(seconds * 1e9)
    for node in job.nodes:
        job.engine.feed(job.batch(node), job.now_ns)
    return job.tick(job.now_ns).findings


def xid_text(code: int) -> str:
    """Return the agent's text for an XID that the driver logged."""
    event = Recognizer().recognize(f"NVRM: Xid (PCI:0000:9b:00): {SAYS[code]}")
    assert event is not None
    return f"{event.severity}: {event.detail}"


@pytest.mark.parametrize(
    ("code", "cause", "advice"),
    [
        (79, "GPU lost", "power-cycle"),
        (119, "GPU error (XID)", "reset the GPU"),
        (120, "GPU error (XID)", "reset the GPU"),
        (48, "GPU error (XID)", "reset the GPU"),
        (64, "GPU error (XID)", "reset the GPU"),
        (95, "GPU error (XID)", "reset the GPU"),
    ],
)
def test_an_xid_that_ends_the_processes_is_a_failure(job, code, cause, advice):
    job.device_event(NODE, "xid", GPU, xid_text(code))
    [found] = tick(job)
    assert (found.kind, found.cause, found.rank, found.node) == ("failure", cause, 3, NODE)
    assert (found.severity, found.suspects_node, found.can_checkpoint) == ("critical", True, False)
    assert advice in found.advice
    assert f"XID {code}" in found.summary
    assert "used by rank 3" in found.summary


@pytest.mark.parametrize(
    ("code", "advice"), [(63, "nothing by itself"), (74, "reset the GPU"), (94, "restart the app")]
)
def test_an_xid_of_a_gpu_that_continues_is_a_warning_with_advice(job, code, advice):
    job.device_event(NODE, "xid", GPU, xid_text(code))
    [found] = tick(job)
    assert (found.kind, found.severity, found.rank) == ("gpu_error", "warning", 3)
    assert not found.suspects_node
    assert found.can_checkpoint
    assert advice in found.advice
    assert tick(job, 500) == []
    [over] = tick(job, 200)
    assert (over.cleared, over.fingerprint) == (True, found.fingerprint)


@pytest.mark.parametrize("detail", ["XID 45", "XID 43", "warning: XID 45: preemptive clean-up; x"])
def test_xids_caused_by_a_killed_process_are_not_reported(job, detail):
    job.device_event(NODE, "xid", GPU, detail)
    assert tick(job) == []


def test_a_burst_is_one_incident(job):
    for _ in range(50):
        job.device_event(NODE, "xid", GPU, xid_text(119))
    [found] = tick(job)
    job.device_event(NODE, "xid", GPU, xid_text(119) + " (49 more since the last report)")
    assert tick(job, 60) == []
    assert len(found.evidence) == 1


def test_a_warning_followed_by_a_fatal_error_becomes_a_failure(job):
    job.device_event(NODE, "xid", GPU, xid_text(63))
    [warning] = tick(job)
    job.device_event(NODE, "xid", GPU, xid_text(95))
    failure, over = tick(job)
    assert (failure.kind, failure.severity) == ("failure", "critical")
    assert [text.text.split("XID ")[1][:2] for text in failure.evidence] == ["95", "63"]
    assert (over.cleared, over.fingerprint) == (True, warning.fingerprint)
    job.device_event(NODE, "xid", GPU, xid_text(79))
    [worst] = tick(job)
    assert (worst.cause, worst.fingerprint) == ("GPU lost", failure.fingerprint)


def test_a_lost_gpu_reported_by_both_collectors_is_one_incident(job):
    job.device_event(NODE, "gpu_lost", GPU, "GPU is lost")
    job.device_event(NODE, "xid", GPU, xid_text(79))
    job.device_event(NODE, "xid", GPU, "XID 79")
    [found] = tick(job)
    assert found.cause == "GPU lost"
    job.device_event(NODE, "gpu_back", GPU)
    assert [each.cleared for each in tick(job)] == [True]


def test_the_kernel_log_is_preferred_and_nvml_is_enough_without_it(job):
    job.device_event(NODE, "xid", GPU, "XID 95")
    [found] = tick(job)
    assert (found.kind, found.rank) == ("failure", 3)
    read = Sample("paceline_kernel_log_lost_total", {}, 0.0, job.now_ns)
    job.engine.feed(job.batch("node-0", samples=[read]), job.now_ns)
    job.device_event("node-0", "xid", "gpu0", "XID 95")
    assert tick(job) == []
    job.device_event("node-0", "xid", "gpu0", xid_text(95))
    [found] = tick(job)
    assert found.rank == 0
    assert [each.text.partition(" reported ")[0] for each in found.evidence] == [
        "node-0",
        "NVML of node-0 also",
    ]


def test_a_second_source_of_an_xid_is_added_once(job):
    job.device_event("node-0", "xid", "gpu0", xid_text(95))
    [found] = tick(job)
    read = Sample("paceline_kernel_log_lost_total", {}, 0.0, job.now_ns)
    job.engine.feed(job.batch("node-0", samples=[read]), job.now_ns)
    job.device_event("node-0", "xid", "gpu0", "XID 95")
    job.device_event("node-0", "xid", "gpu0", "XID 95")
    [joined] = tick(job)
    assert joined.fingerprint == found.fingerprint
    assert joined.evidence[1].text == "NVML of node-0 also reported XID 95 of gpu0"
    job.device_event("node-0", "xid", "gpu0", "XID 95")
    assert tick(job, 5) == []


def test_an_xid_that_is_missing_in_the_kernel_log_is_reported(job):
    read = Sample("paceline_kernel_log_lost_total", {}, 0.0, job.now_ns)
    job.engine.feed(job.batch("node-0", samples=[read]), job.now_ns)
    job.device_event("node-0", "xid", "gpu0", "XID 95")
    assert tick(job, 1) == []
    [found] = tick(job, 3)
    assert (found.kind, found.rank) == ("failure", 0)


def test_an_unidentified_gpu_is_a_warning_about_its_node(job):
    job.device_event(NODE, "xid", "0000:9b:00.0", xid_text(79))
    [found] = tick(job)
    assert (found.kind, found.severity, found.rank) == ("gpu_error", "warning", None)
    assert found.ranks == [2, 3]


def test_a_fatal_nvswitch_error_concerns_all_its_gpus(job):
    line = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"
    event = Recognizer().recognize(line)
    job.device_event(NODE, "sxid", event.device, f"{event.severity}: {event.detail}")
    [found] = tick(job)
    assert (found.kind, found.ranks, found.suspects_node) == ("failure", [2, 3], True)


def test_errors_of_the_previous_generation_are_ignored(job):
    old = DeviceEvent(
        time_ns=job.placement().started_ns - 3600 * 10**9,
        kind="xid",
        device=GPU,
        detail=xid_text(95),
    )
    job.engine.feed(job.batch(NODE, events=[old]), job.now_ns)
    assert tick(job) == []


@pytest.mark.parametrize("detail", ["", "XID", "critical: XID x", "warning: XID 9999999999999"])
def test_malformed_events_are_ignored(job, detail):
    job.device_event(NODE, "xid", GPU, detail)
    assert tick(job) == []


def test_a_gpu_that_stays_hung_is_a_warning_until_it_responds(job):
    job.device_event(NODE, "gpu_hung", GPU, "does not answer")
    assert tick(job, 5) == []
    [found] = tick(job, 6)
    assert (found.kind, found.cause, found.severity) == ("gpu_error", "GPU hung", "warning")
    assert (found.rank, found.node) == (3, NODE)
    assert not found.suspects_node
    assert "does not respond to its driver" in found.summary
    assert "reset the GPU" in found.advice
    assert tick(job, 700) == []
    job.device_event(NODE, "gpu_back", GPU)
    [over] = tick(job)
    assert (over.cleared, over.fingerprint) == (True, found.fingerprint)


def test_a_gpu_that_is_briefly_unresponsive_is_not_reported(job):
    job.device_event(NODE, "gpu_hung", GPU, "does not answer")
    assert tick(job, 5) == []
    job.device_event(NODE, "gpu_back", GPU)
    assert tick(job, 30) == []


def test_a_hung_gpu_that_is_lost_after_all_is_a_failure(job):
    job.device_event(NODE, "gpu_hung", GPU, "does not answer")
    [warned] = tick(job, 12)
    job.device_event(NODE, "gpu_lost", GPU, "GPU is lost")
    lost, over = tick(job)
    assert (lost.kind, lost.cause) == ("failure", "GPU lost")
    assert (over.cleared, over.fingerprint) == (True, warned.fingerprint)


def test_a_hung_gpu_without_a_rank_is_not_reported(job):
    job.device_event(NODE, "gpu_hung", "gpu7", "does not answer")
    assert tick(job, 30) == []


FAULT = "warning: XID 31: memory page fault; RESTART_APP: restart; pid 1001 (python) "


@pytest.mark.parametrize("whose", ["[another process]", "[rank 0 of another-job]"])
def test_a_fault_of_another_jobs_process_on_the_gpu_is_not_reported(job, whose):
    add_kernel_log(job)
    job.device_event(NODE, "xid", GPU, FAULT + whose)
    job.device_event(NODE, "xid", GPU, "XID 31")  # NVML reports no process
    assert [*tick(job), *tick(job, 5), *tick(job, 5)] == []


@pytest.mark.parametrize("whose", ["", f"[rank 3 of {JOB}]"])
def test_a_fault_of_the_jobs_own_or_of_an_unknown_process_is_reported(job, whose):
    job.device_event(NODE, "xid", GPU, FAULT + whose)
    assert [found.kind for found in tick(job)] == ["gpu_error"]


def add_kernel_log(job: SimulatedJob) -> None:
    read = Sample("paceline_kernel_log_lost_total", {}, 0.0, job.now_ns)
    job.engine.feed(job.batch(NODE, samples=[read]), job.now_ns)
