"""The nvml collector in its own process, through the real pynvml, on emulated GPUs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from paceline_agent.collect.blocks import count, each
from paceline_agent.collect.collectors.nvml import NvmlCollector
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_agent.collect.pool import ProcessLane, WorkerDied
from paceline_agent.expose import catalog
from paceline_demo.fake_nvml import FakeGpus, environment

SECOND_NS = 1_000_000_000


@pytest.fixture
async def lane(context, gpus) -> AsyncIterator[ProcessLane]:
    lane = ProcessLane(NvmlCollector, context)
    yield lane
    lane.abandon()
    await lane.close()


def of_gpu(found: dict[str, float], metric: str, gpu: int) -> list[float]:
    return [
        value
        for name, value in found.items()
        if name.startswith(f"{metric}{{") and f"gpu={gpu}" in name.replace("}", ",").split("{")[1]
    ]


async def test_a_healthy_gpu_in_the_units_of_dcgm(lane, gpus, series):
    collected = await lane.collect(SECOND_NS)
    found = series(collected)
    expected = {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
        "DCGM_FI_DEV_GPU_TEMP": 46,
        "DCGM_FI_DEV_MEMORY_TEMP": 55,
        "DCGM_FI_DEV_POWER_USAGE": 512.4,
        "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": 700,
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_FB_USED": 96_420,
        "DCGM_FI_DEV_FB_TOTAL": 143_771,
        "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 0,
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0,
        "DCGM_FI_DEV_POWER_VIOLATION": 0,
        "DCGM_FI_DEV_THERMAL_VIOLATION": 0,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": 0,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0,
        "paceline_gpu_sm_clock_max_mhz": 1980,
        "paceline_gpu_pcie_width": 16,
        "paceline_gpu_pcie_generation_max": 5,
        "paceline_gpu_nvlink_active_links": 18,
        "paceline_gpu_lost": 0,
    }
    for metric, value in expected.items():
        assert of_gpu(found, metric, 1) == [value], metric
    assert [gpu.index for gpu in collected.gpus or []] == [0, 1]
    labels = next(s.labels for s in collected.everything() if s.name == "DCGM_FI_DEV_SM_CLOCK")
    assert labels["Hostname"] == "node-0"
    assert labels["device"] == "nvidia0"
    assert {"gpu", "UUID", "pci_bus_id", "modelName"} <= labels.keys()
    assert of_gpu(found, "DCGM_FI_DEV_XID_ERRORS", 1) == [0]


async def test_a_throttle_shows_at_the_next_sweep(lane, gpus, series):
    await lane.collect(SECOND_NS)
    gpus.set(0, sm_clock_mhz=900, temperature_celsius=91, throttle_reasons=["hw_thermal_slowdown"])
    found = series(await lane.collect(2 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 0) == [900]
    assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 1) == [1980]
    active = {name for name, value in found.items() if "throttle_reason" in name and value}
    uuid = next(name for name in found if name.startswith("DCGM_FI_DEV_SM_CLOCK"))
    uuid = uuid.partition("UUID=")[2].partition(",")[0]
    assert active == {
        f"paceline_gpu_throttle_reason{{UUID={uuid},gpu=0,reason=hw_thermal_slowdown}}"
    }


@pytest.mark.parametrize("answer", ["unsupported", "denied"])
async def test_what_a_gpu_does_not_support_is_asked_once_and_absent(lane, gpus, series, answer):
    gpus.set(0, **{answer: ["power", "ecc", "nvlink", "utilization"]})
    asked = []
    for sweep in range(3):
        found = series(await lane.collect(sweep * 20 * SECOND_NS))
        for metric in (
            "DCGM_FI_DEV_POWER_USAGE",
            "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
            "DCGM_FI_DEV_ECC_CURRENT",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
            "paceline_gpu_nvlink_active_links",
        ):
            assert of_gpu(found, metric, 0) == [], metric
            assert len(of_gpu(found, metric, 1)) == 1, metric
        asked.append(gpus.get(0, "refused"))
    assert asked[0] > 0
    assert asked == [asked[0]] * 3


async def test_what_fails_now_and_then_is_asked_again(lane, gpus, series):
    gpus.set(0, failing=["power", "energy"])
    found = series(await lane.collect(SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_POWER_USAGE", 0) == []
    assert of_gpu(found, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 0) == []
    assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 0) == [1980]
    gpus.set(0, failing=[])
    found = series(await lane.collect(2 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_POWER_USAGE", 0) == [512.4]
    assert len(of_gpu(found, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 0)) == 1


async def test_a_lost_gpu_is_reported_once_and_when_it_returns(lane, gpus, series):
    await lane.collect(SECOND_NS)
    gpus.set(1, lost=1)
    events = []
    for sweep in range(2, 5):
        collected = await lane.collect(sweep * SECOND_NS)
        events += collected.events
        found = series(collected)
        assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 0) == [1980]
        assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 1) == []
        assert of_gpu(found, "paceline_gpu_lost", 1) == [1]
    assert [(event.kind, event.device) for event in events] == [("gpu_lost", "gpu1")]
    assert [gpu.trouble for gpu in collected.gpus] == [None, "lost"]
    gpus.set(1, lost=0)
    collected = await lane.collect(120 * SECOND_NS)  # after the new initialization
    assert [event.kind for event in collected.events] == ["gpu_back"]
    assert [gpu.trouble for gpu in collected.gpus] == [None, None]
    assert of_gpu(series(collected), "DCGM_FI_DEV_SM_CLOCK", 1) == [1980]


async def test_a_gpu_that_is_lost_from_the_start_does_not_hide_the_others(lane, gpus, series):
    gpus.set(0, lost=1)
    collected = await lane.collect(SECOND_NS)
    assert [(event.kind, event.device) for event in collected.events] == [("gpu_lost", "gpu0")]
    assert [(gpu.index, gpu.trouble) for gpu in collected.gpus] == [(0, "lost"), (1, None)]


async def test_a_gpu_of_another_container_is_not_lost(lane, gpus, series):
    gpus.set(0, denied=["handle"])
    for sweep in (1, 2):
        collected = await lane.collect(sweep * SECOND_NS)
        assert collected.events == []
        assert {sample.labels["gpu"] for sample in each(collected.samples)} == {"1"}
    assert [gpu.index for gpu in collected.gpus or []] == [1]
    assert gpus.get(0, "refused") == 1


async def test_the_same_xid_twice_is_two_events(lane, gpus, series):
    await lane.collect(SECOND_NS)
    gpus.set(0, xid=79)
    gpus.set(0, xid=79)
    collected = await lane.collect(2 * SECOND_NS)
    assert [event.detail for event in collected.events] == ["XID 79", "XID 79"]
    found = series(await lane.collect(3 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_XID_ERRORS", 0) == [79]
    assert of_gpu(found, "DCGM_EXP_XID_ERRORS_COUNT", 0) == [2]


async def test_a_driver_that_is_reloaded_is_taken_up(lane, gpus, series):
    found = series(await lane.collect(SECOND_NS))
    assert any("driver_version=590.48.01" in name for name in found)
    gpus.set_driver(loaded=False)
    with pytest.raises(CollectorUnavailable, match="Driver Not Loaded"):
        await lane.collect(2 * SECOND_NS)
    gpus.set_driver(loaded=True, version="595.80")
    collected = await lane.collect(3 * SECOND_NS)
    assert of_gpu(series(collected), "DCGM_FI_DEV_SM_CLOCK", 1) == [1980]
    assert any("driver_version=595.80" in name for name in series(collected))
    assert collected.events == [], "no GPU was lost"


async def test_one_gpu_that_hangs_silences_no_other(lane, gpus, series):
    await lane.collect(SECOND_NS)
    gpus.set(1, hang_seconds=600)
    events = []
    for sweep in range(2, 6):
        collected = await lane.collect(sweep * SECOND_NS)
        events += collected.events
        found = series(collected)
        assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 0) == [1980]
        assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 1) == []
        assert of_gpu(found, "paceline_gpu_hung", 1) == [1]
    assert [event.kind for event in events] == ["gpu_hung", "quarantined"]
    threads = len(os.listdir(f"/proc/{lane.pid}/task"))
    assert threads <= 3, "calls are piled up in the driver"
    gpus.set(1, hang_seconds=0)
    events = []
    for sweep in range(6, 60):
        collected = await lane.collect(sweep * SECOND_NS)
        events += collected.events
        if events:
            break
        await asyncio.sleep(0.05)
    assert [event.kind for event in events] == ["recovered", "gpu_back"]
    assert of_gpu(series(collected), "DCGM_FI_DEV_SM_CLOCK", 1) == [1980]


async def test_a_gpu_that_hangs_for_long_can_hold_no_rank(lane, gpus):
    await lane.collect(SECOND_NS)
    gpus.set(1, hang_seconds=600)
    troubles = {
        second: [gpu.trouble for gpu in (await lane.collect(second * SECOND_NS)).gpus]
        for second in (2, 11, 12)
    }
    assert troubles == {2: [None, None], 11: [None, None], 12: [None, "hung"]}
    gpus.set(1, hang_seconds=0)


async def test_renumbered_gpus_are_not_confused(lane, gpus):
    """A new initialization drops the lost GPU, and another GPU gets its index."""
    uuids = [gpu.uuid for gpu in (await lane.collect(SECOND_NS)).gpus]
    gpus.set(0, lost=1)
    await lane.collect(2 * SECOND_NS)
    gpus.drop(0)
    collected = await lane.collect(120 * SECOND_NS)
    assert collected.events == [], "the one that moved up is not the lost one, back"
    assert [(gpu.index, gpu.uuid, gpu.trouble) for gpu in collected.gpus] == [(0, uuids[1], None)]


async def test_a_library_that_comes_later_is_picked_up(
    context, gpus, nvml_library, tmp_path, monkeypatch
):
    late = tmp_path / "driver"  # the loader must notice the new file, even here
    late.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(late))
    lane = ProcessLane(NvmlCollector, context)
    with pytest.raises(CollectorUnavailable, match="no usable NVIDIA driver"):
        await lane.collect(SECOND_NS)
    assert lane.pid is None, "a node without a GPU pays for no process"
    (late / "libnvidia-ml.so.1").symlink_to(nvml_library / "libnvidia-ml.so.1")
    assert (await lane.collect(2 * SECOND_NS)).samples
    await lane.close()


async def test_a_worker_that_is_killed_is_replaced(lane, gpus):
    await lane.collect(SECOND_NS)
    assert lane.pid is not None
    os.kill(lane.pid, 9)
    with pytest.raises(WorkerDied, match="signal 9"):
        await lane.collect(2 * SECOND_NS)
    assert (await lane.collect(3 * SECOND_NS)).samples


async def test_no_worker_outlives_its_agent(context, gpus, tmp_path):
    """The agent is killed by SIGKILL while its worker hangs in the driver."""
    gpus.set(0, hang_seconds=600)
    program = (
        "import asyncio, pathlib, sys\n"
        "from paceline_agent.collect.pool import ProcessLane\n"
        "from paceline_agent.collect.contract import Context\n"
        "from paceline_agent.collect.collectors.nvml import NvmlCollector\n"
        "async def main():\n"
        "    lane = ProcessLane(NvmlCollector, Context(node_directory=pathlib.Path('.')))\n"
        "    asyncio.create_task(lane.collect(1))\n"
        "    await lane.opened.wait()\n"
        "    print(lane.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        worker = int(await asyncio.to_thread(agent.stdout.readline))
        assert is_running(worker)
        agent.kill()
    deadline = time.monotonic() + 60
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker is an orphan"
        await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


async def test_a_state_file_that_is_none_means_no_driver(context, gpus, tmp_path, monkeypatch):
    (tmp_path / "rubbish").write_bytes(b"x" * 100_000)
    monkeypatch.setenv("PACELINE_FAKE_NVML_STATE", str(tmp_path / "rubbish"))
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context))
    with pytest.raises(CollectorUnavailable, match="Driver Not Loaded"):
        await lane.collect(SECOND_NS)


async def test_links_have_series_of_their_own(lane, gpus, series):
    gpus.set(0, nvlink_links_active=17, nvlink_replay_errors=12, nvlink_error_link=3)
    found = series(await lane.collect(SECOND_NS))
    by_link = {
        int(labels["link"]): value
        for labels, value in with_labels(found, "paceline_gpu_nvlink_replay_errors_total", gpu="0")
    }
    assert by_link == {link: 12 if link == 3 else 0 for link in range(18)}
    up = with_labels(found, "paceline_gpu_nvlink_up", gpu="0")
    assert [value for labels, value in up if labels["link"] == "17"] == [0]
    assert sum(value for _, value in up) == 17
    moved = {
        labels["link"]: value
        for labels, value in with_labels(
            found, "paceline_gpu_nvlink_transmitted_bytes_total", gpu="0"
        )
    }
    assert moved["all"] == 81_920_000 * 1024
    assert moved["5"] == 81_920_000 // 18 * 1024
    speeds = with_labels(found, "paceline_gpu_nvlink_link_bytes_per_second", gpu="0")
    assert {value for _, value in speeds} == {26.562e9}


async def test_where_links_go(lane, gpus):
    """Links go to switches, directly to other GPUs (a board without switches), or are unknown."""
    gpus.set(0, nvlink_links_active=17)
    info = (await lane.collect(SECOND_NS)).gpus
    assert [gpu.nvlinks for gpu in info] == [{"switch": 17}, {"switch": 18}]
    for gpu in (0, 1):
        gpus.set(gpu, nvlink_links=12, nvlink_links_active=12, nvlink_links_per_peer=12)
    gpus.set_driver(loaded=False)
    with pytest.raises(CollectorUnavailable):
        await lane.collect(2 * SECOND_NS)
    gpus.set_driver(loaded=True)
    info = (await lane.collect(80 * SECOND_NS)).gpus
    assert [gpu.nvlinks for gpu in info] == [{info[1].pci_bus_id: 12}, {info[0].pci_bus_id: 12}]
    gpus.set(1, nvlink_links_active=11, unsupported=["nvlink_ends"])
    info = (await lane.collect(100 * SECOND_NS)).gpus
    assert info[1].nvlinks == {}


async def test_activity_is_the_mean_between_two_looks(lane, gpus, series):
    gpus.set(0, tensor_active_percent=57.5, sm_active_percent=float("nan"))
    gpus.set(1, unsupported=["activity"])
    first = series(await lane.collect(SECOND_NS))
    assert not any("PROF" in name for name in first)
    found = series(await lane.collect(20 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0) == [0.575]
    assert of_gpu(found, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0) == [0.97]
    assert of_gpu(found, "DCGM_FI_PROF_PCIE_TX_BYTES", 0) == [pytest.approx(4_217 * 1024)]
    assert of_gpu(found, "DCGM_FI_PROF_SM_ACTIVE", 0) == [], "no number"
    assert of_gpu(found, "DCGM_FI_PROF_NVLINK_TX_BYTES", 0) == [], "not of this GPU"
    assert of_gpu(found, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1) == []


async def test_a_total_that_the_driver_lacks_is_summed(lane, gpus, series):
    gpus.set(0, unsupported=["link_scopes"], nvlink_transmitted_kib=18_000)
    found = series(await lane.collect(SECOND_NS))
    moved = with_labels(found, "paceline_gpu_nvlink_transmitted_bytes_total", gpu="0", link="all")
    assert [value for _, value in moved] == [18_000 * 1024]


async def test_nvlink_bandwidth_is_a_rate_as_in_dcgm(lane, gpus, series):
    """DCGM's field 449 is thousands of KiB per second, both directions."""
    started = time.monotonic()
    found = series(await lane.collect(SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 0) == []
    sent = gpus.get(0, "nvlink_transmitted_kib")
    gpus.set(0, nvlink_transmitted_kib=sent + 100_000_000)
    found = series(await lane.collect(20 * SECOND_NS))
    (rate,) = of_gpu(found, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 0)
    assert 0 < 100_000 / rate <= time.monotonic() - started + 0.01
    gpus.set(0, nvlink_transmitted_kib=5)  # the counter is reset
    found = series(await lane.collect(40 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 0) == []


async def test_mig_instances_are_gpus_of_their_own(lane, gpus, series):
    gpus.set(0, mig_mode=1, mig_instances=2, mig_memory_used_mib_each=1500)
    found = series(await lane.collect(SECOND_NS))
    used = with_labels(found, "DCGM_FI_DEV_FB_USED", GPU_I_PROFILE="1g.18gb")
    assert [(labels["GPU_I_ID"], value) for labels, value in used] == [("7", 1500), ("8", 1500)]
    assert of_gpu(found, "DCGM_FI_DEV_GPU_UTIL", 0) == [], "a GPU in MIG mode has none"
    gpus.set(0, mig_mode=0)
    found = series(await lane.collect(20 * SECOND_NS))
    assert with_labels(found, "DCGM_FI_DEV_FB_USED", GPU_I_PROFILE="1g.18gb") == []
    found = series(await lane.collect(40 * SECOND_NS))
    assert of_gpu(found, "DCGM_FI_DEV_GPU_UTIL", 0) == [97], (
        "values that the mode disabled are read again"
    )


async def test_processes_are_joined_to_ranks(context, gpus, series, write):
    """The processes are a rank's own, a child of a rank, and another user's."""
    rank = LocalRank(job="llm", generation=0, rank=9, local_rank=1, pid=100)
    stat = "{pid} (worker (1)) S {parent} 100 100 0"
    write(
        context.procfs_root,
        {f"{pid}/stat": stat.format(pid=pid, parent=parent) for pid, parent in FAMILY.items()},
    )
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context, local_ranks=lambda: [rank]))
    gpus.set_processes(0, {100: 5 << 30, 102: 1 << 30, 200: 2 << 30})
    found = series(await lane.collect(SECOND_NS))
    await lane.close()
    used = with_labels(found, "paceline_gpu_process_memory_bytes")
    assert {labels["pid"]: value for labels, value in used} == {
        "100": 5 << 30, "102": 1 << 30, "200": 2 << 30,
    }  # fmt: skip
    joined = with_labels(found, "paceline_gpu_process_info")
    assert [(info["job"], info["rank"], info["pid"], info["gpu"]) for info, _ in joined] == [
        ("llm", "9", "100", "0"),
        ("llm", "9", "102", "0"),
    ]
    assert of_gpu(found, "paceline_gpu_processes", 1) == [0]


FAMILY = {100: 1, 101: 100, 102: 101, 200: 1}  # by pid: its parent


def ranks_on_one_gpu() -> list[LocalRank]:
    return [
        LocalRank(job=job, generation=1, rank=rank, local_rank=0, pid=pid)
        for job, rank, pid in (("llm", 0, 100), ("llm", 1, 200), ("other", 0, 300))
    ]


async def of_ranks(lane, series, second: int) -> dict[tuple[str, str, str], float]:
    """Return the metrics of ranks of the sweep: (short name, job, rank) -> value."""
    found = series(await lane.collect(second * SECOND_NS))
    names = ("other_processes", "others_utilization_ratio", "utilization_ratio")
    return {
        (name, labels["job"], labels["rank"]): value
        for name in names
        for labels, value in with_labels(found, f"paceline_rank_gpu_{name}")
    }


async def test_other_processes_on_the_gpu_of_a_rank_are_those_of_no_rank_of_its_job(
    context, gpus, series
):
    """700 has most of its memory on the other GPU; 400 belongs to no rank."""
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context, local_ranks=ranks_on_one_gpu))
    gpus.set_processes(0, {100: 5 << 30, 200: 5 << 30, 400: 1 << 30, 700: 1 << 29})
    gpus.set_processes(1, {300: 5 << 30, 700: 9 << 30})
    gpus.set_utilization(0, {100: 30, 200: 20, 400: 45})
    await of_ranks(lane, series, 1)
    found = await of_ranks(lane, series, 2)
    assert found == {
        ("other_processes", "llm", "0"): 1,
        ("other_processes", "llm", "1"): 1,
        ("other_processes", "other", "0"): 1,
        ("others_utilization_ratio", "llm", "0"): 0.45,
        ("others_utilization_ratio", "llm", "1"): 0.45,
        ("others_utilization_ratio", "other", "0"): 0.0,
        ("utilization_ratio", "llm", "0"): 0.3,
        ("utilization_ratio", "llm", "1"): 0.2,
        ("utilization_ratio", "other", "0"): 0.0,
    }
    gpus.set_utilization(0, {})
    later = await of_ranks(lane, series, 3)
    assert later["utilization_ratio", "llm", "0"] == 0, "read each second, also if nothing computes"
    await lane.close()


async def test_a_rank_alone_on_its_gpu_has_no_other_processes(context, gpus, series):
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context, local_ranks=ranks_on_one_gpu))
    gpus.set_processes(0, {100: 5 << 30})
    gpus.set_utilization(0, {100: 90})
    await of_ranks(lane, series, 1)
    assert await of_ranks(lane, series, 2) == {("other_processes", "llm", "0"): 0}
    await lane.close()


async def test_processes_on_a_gpu_that_reports_no_utilization_are_counted(context, gpus, series):
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context, local_ranks=ranks_on_one_gpu))
    gpus.set(0, unsupported=["process_utilization"])
    gpus.set_processes(0, {100: 5 << 30, 300: 5 << 30})
    await of_ranks(lane, series, 1)
    assert await of_ranks(lane, series, 2) == {
        ("other_processes", "llm", "0"): 1,
        ("other_processes", "other", "0"): 1,
    }
    await lane.close()


async def test_the_gpu_of_a_rank_is_where_it_has_most_memory(context, gpus, write):
    """This holds in a container with its own pids too.

    Each rank uses some memory on the first GPU.
    """
    ranks = [LocalRank(job="llm", generation=0, rank=9, local_rank=1, pid=7)]
    for host_pid, rank in ((500, 8), (600, 9)):
        inside = {
            f"{host_pid}/status": f"Name:\tpython\nNSpid:\t{host_pid}\t7\n",
            f"{host_pid}/environ": f"HOME=/root\0RANK={rank}\0",
        }
        write(context.procfs_root, inside)
    gpus.set_processes(0, {600: 1 << 28})
    gpus.set_processes(1, {600: 60 << 30, 700: 1 << 30})
    lane = ProcessLane(NvmlCollector, dataclasses.replace(context, local_ranks=lambda: ranks))
    collected = await lane.collect(SECOND_NS)
    assert collected.gpu_of_pid == {7: 1}
    assert (await lane.collect(2 * SECOND_NS)).gpu_of_pid is None, "not looked up each second"
    await lane.close()


async def test_what_hardly_changes_is_read_every_ten_seconds(lane, gpus):
    first = await lane.collect(SECOND_NS)
    assert count(first.lasting or ()) > 2 * 100
    for second in range(2, 11):
        assert (await lane.collect(second * SECOND_NS)).lasting is None
    later = await lane.collect(11 * SECOND_NS)
    assert count(later.lasting or ()) >= count(first.lasting or ())
    assert (await lane.collect(3 * SECOND_NS)).lasting is None
    back_an_hour = await lane.collect(-3600 * SECOND_NS)
    assert back_an_hour.lasting is not None, "a clock that was set back stops nothing"


async def test_every_series_is_described(lane, gpus):
    gpus.set(0, mig_mode=1, mig_instances=1)
    gpus.set_processes(0, {1: 1 << 30})
    await lane.collect(SECOND_NS)
    gpus.set(0, xid=13)
    collected = await lane.collect(20 * SECOND_NS)
    known = catalog.load()
    names = {sample.name for sample in collected.everything()}
    assert len(names) > 70
    assert {name for name in names if known.describe(name).help == catalog.UNLISTED} == set()


async def test_the_recorded_h200(nvml_library, tmp_path, monkeypatch, context, series):
    """The values equal those of `nvidia-smi -q` on that GPU under load."""
    found = await one_sweep(nvml_library, tmp_path, monkeypatch, context, series, "h200")
    expected = {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
        "DCGM_FI_DEV_VIDEO_CLOCK": 1545,
        "DCGM_FI_DEV_POWER_USAGE": 627.32,
        "DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN": 200,
        "DCGM_FI_DEV_GPU_TEMP": 52,
        "DCGM_FI_DEV_GPU_TEMP_LIMIT": 35,
        "DCGM_FI_DEV_MEMORY_TEMP": 41,
        "DCGM_FI_DEV_FB_TOTAL": 143_771,
        "DCGM_FI_DEV_FB_RESERVED": 614,
        "DCGM_FI_DEV_FB_USED": 32_362,
        "DCGM_FI_DEV_PERSISTENCE_MODE": 1,
        "DCGM_FI_DEV_ECC_CURRENT": 1,
        "DCGM_FI_DEV_MIG_MODE": 0,
        "DCGM_FI_DEV_PCIE_TX_THROUGHPUT": 4217,
        "DCGM_FI_DEV_PCIE_LINK_GEN": 5,
        "paceline_gpu_nvlink_active_links": 18,
    }
    for metric, value in expected.items():
        assert of_gpu(found, metric, 0) == [pytest.approx(value)], metric
    margins = with_labels(found, "paceline_gpu_temperature_threshold_margin_celsius")
    assert {labels["threshold"]: value for labels, value in margins} == {
        "shutdown": -8, "slowdown": -2, "memory_maximum": 0, "maximum": 0,
    }  # fmt: skip
    assert of_gpu(found, "DCGM_FI_DEV_RETIRED_SBE", 0) == []
    info = with_labels(found, "paceline_gpu_info")
    assert [labels["vbios_version"] for labels, _ in info] == ["96.00.A5.00.03"]


async def test_the_recorded_l40s(nvml_library, tmp_path, monkeypatch, context, series):
    found = await one_sweep(nvml_library, tmp_path, monkeypatch, context, series, "l40s")
    assert of_gpu(found, "DCGM_FI_DEV_MEM_CLOCK", 0) == [9001]
    assert of_gpu(found, "DCGM_FI_DEV_POWER_VIOLATION", 0) == [204_642_816_000]
    assert of_gpu(found, "DCGM_FI_DEV_ENC_UTIL", 0) == [59]
    assert of_gpu(found, "DCGM_FI_DEV_PERSISTENCE_MODE", 0) == [0]
    absent = ("nvlink", "NVLINK", "MEMORY_TEMP", "MEM_MAX_OP_TEMP", "MIG", "RETIRED")
    assert [name for name in found if any(word in name for word in absent)] == []


async def one_sweep(library, tmp_path, monkeypatch, context, series, model) -> dict[str, float]:
    fake = FakeGpus.create(tmp_path / model, 1, model)
    for name, value in environment(library, fake.path).items():
        monkeypatch.setenv(name, value)
    lane = ProcessLane(NvmlCollector, context)
    found: dict[str, float] = series(await lane.collect(SECOND_NS))
    await lane.close()
    return found


def with_labels(
    found: dict[str, float], metric: str, **labels: str
) -> list[tuple[dict[str, str], float]]:
    matching = []
    for name, value in found.items():
        own, _, text = name.removesuffix("}").partition("{")
        info = dict(pair.split("=", 1) for pair in text.split(",")) if text else {}
        if own == metric and labels.items() <= info.items():
            matching.append((info, value))
    return matching


async def test_a_value_of_an_unknown_type_costs_only_that_field_of_that_gpu(lane, gpus, series):
    gpus.set(0, strange_field=82)  # field number of the memory temperature
    found = series(await lane.collect(SECOND_NS))
    names = {
        gpu: {
            name.partition("{")[0]
            for name in found
            if of_gpu({name: 0.0}, name.partition("{")[0], gpu)
        }
        for gpu in (0, 1)
    }
    assert names[1] - names[0] == {"DCGM_FI_DEV_MEMORY_TEMP"}
    assert of_gpu(found, "DCGM_FI_DEV_MEMORY_TEMP", 1) == [55]


@pytest.mark.parametrize(
    ("field", "metric"),
    [
        ("temperature_celsius", "DCGM_FI_DEV_GPU_TEMP"),
        ("memory_temperature_celsius", "DCGM_FI_DEV_MEMORY_TEMP"),
        ("sm_clock_mhz", "DCGM_FI_DEV_SM_CLOCK"),
        ("power_milliwatts", "DCGM_FI_DEV_POWER_USAGE"),
        ("pcie_replays", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),
    ],
)
async def test_all_bits_set_is_not_a_value(lane, gpus, series, field, metric):
    gpus.set(0, **{field: 0xFFFF_FFFF})
    found = series(await lane.collect(SECOND_NS))
    assert of_gpu(found, metric, 0) == []
    assert len(of_gpu(found, metric, 1)) == 1
    assert all(value < 4e9 for value in of_gpu(found, "DCGM_FI_DEV", 0))


@pytest.mark.parametrize("code", [77, 999, 12345])
async def test_an_error_that_is_not_known_is_no_lost_gpu(lane, gpus, series, code):
    await lane.collect(SECOND_NS)
    gpus.set(0, error=code)
    collected = await lane.collect(2 * SECOND_NS)
    found = series(collected)
    assert of_gpu(found, "paceline_gpu_lost", 0) == [0]
    assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 0) == []
    assert of_gpu(found, "DCGM_FI_DEV_SM_CLOCK", 1) == [1980]
    assert [event.kind for event in collected.events] == []


async def test_a_name_that_is_not_utf_8_is_shown_with_replacements(lane, gpus):
    gpus.set_text(0, "name", b"NVIDIA \xff H200")
    collected = await lane.collect(SECOND_NS)
    assert [gpu.name for gpu in collected.gpus or []] == ["NVIDIA \ufffd H200", "NVIDIA H200"]


async def test_xids_are_absent_where_the_driver_does_not_report_them(lane, gpus, series):
    gpus.set(0, unsupported=["events"])
    collected = await lane.collect(SECOND_NS)
    found = series(collected)
    assert of_gpu(found, "DCGM_FI_DEV_XID_ERRORS", 0) == []
    assert of_gpu(found, "DCGM_FI_DEV_XID_ERRORS", 1) == [0]
    assert [gpu.reports_xids for gpu in collected.gpus or []] == [False, True]
