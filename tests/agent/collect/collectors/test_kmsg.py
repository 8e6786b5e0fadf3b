"""The collector with files, and with a FIFO, which like the device is non-blocking and not
seekable."""

from __future__ import annotations

import bz2
import dataclasses
import fcntl
import gzip
import lzma
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from paceline_agent.collect.collectors.kmsg import KmsgCollector
from paceline_agent.collect.contract import CollectorUnavailable, LocalRank
from paceline_agent.collect.kernel_log import parse
from paceline_agent.collect.kernel_log.buffer import KernelLogBuffer
from paceline_wire.batch import DeviceEvent, GpuInfo

LOGS = Path(__file__).parents[2] / "fixtures" / "kmsg"
SECOND_NS = 1_000_000_000
BEGAN_NS = 1000 * SECOND_NS  # time on the log's clock at which the agent starts
NOW_NS = 1_700_000_000 * SECOND_NS


class Device:
    """A replacement for /dev/kmsg: one writer, records in order, never blocks its reader."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer can open
        self._writer = os.open(path, os.O_WRONLY)
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, 1 << 18)
        self._sequence = 100

    def write(
        self, message: str, boot_seconds: float = BEGAN_NS / SECOND_NS, skip: int = 0
    ) -> None:
        self._sequence += 1 + skip
        record = f"3,{self._sequence},{boot_seconds * 1e6:.0f},-;{message}\n SUBSYSTEM=pci\n"
        os.write(self._writer, record.encode())

    def rewind(self) -> None:
        """Replace the log with the messages that a reader gets after opening it again."""
        self._sequence = 100

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def device(tmp_path):
    device = Device(tmp_path / "kmsg")
    yield device
    device.close()


def _as_utf16(text: bytes) -> bytes:
    return text.decode().encode("utf-16")


class ClockedKmsg(KmsgCollector):
    """The collector with a log clock that the test controls."""

    elapsed_ns = 0

    def boot_ns(self, clock: int = time.CLOCK_MONOTONIC) -> int:
        return BEGAN_NS + self.elapsed_ns


@pytest.fixture
def collector(context, device):
    collector = ClockedKmsg(dataclasses.replace(context, kmsg_path=device.path))
    yield collector
    collector.close()


def xid(code: int, address: str = "0000:9b:00") -> str:
    return f"NVRM: Xid (PCI:{address}): {code}, pid=77, name=python, something"


def total(kind: str, code: str, device: str) -> str:
    return f"paceline_kernel_events_total{{code={code},device={device},kind={kind}}}"


def event_list(collected) -> list[tuple[str, str]]:
    return [(event.kind, event.device) for event in collected.events]


def test_golden_log(series):
    lines = (LOGS / "xid-119.dmesg").read_text().splitlines()
    collected = parse(lines, NOW_NS)
    assert series(collected) == {
        total("xid", "119", "0000:9b:00.0"): 5,
        "DCGM_EXP_XID_ERRORS_COUNT{pci_bus_id=00000000:9B:00.0,xid=119}": 5,
        total("gsp_errors_suppressed", "", "0000:9b:00.0"): 1,
        "paceline_kernel_xid_info{action=RESET_GPU,advice=drain the node and reset the GPU; "
        "replace it if that recurs,meaning=timeout of a call to the GPU's system processor (GSP),"
        "severity=critical,xid=119}": 1,
    }
    first, *others = [event for event in collected.events if event.kind == "xid"]
    assert "XID 119" in first.detail
    assert "pid 2024380 (nvidia-smi)" in first.detail
    assert "RESET_GPU" in first.detail
    assert len(others) == 2
    assert "2 more" in others[0].detail


def test_a_log_without_trouble_is_silent(series):
    collected = parse((LOGS / "quiet.kmsg").read_text().splitlines(), NOW_NS)
    assert (series(collected), collected.events) == ({}, [])


def test_earlier_messages_are_counted_but_not_reported(collector, device, series):
    device.write(xid(79), boot_seconds=10)
    collected = collector.collect(NOW_NS)
    assert series(collected)[total("xid", "79", "0000:9b:00.0")] == 1
    assert collected.events == []


def test_messages_since_the_start_of_the_agent_are_reported_even_if_read_first(collector, device):
    collector.elapsed_ns = 5 * SECOND_NS
    device.write(xid(79), boot_seconds=1003)
    (event,) = collector.collect(NOW_NS).events
    assert event.time_ns == NOW_NS - 2 * SECOND_NS


def test_a_new_message_is_reported_immediately_with_its_time(collector, device, series):
    collector.collect(NOW_NS)
    device.write(xid(95), boot_seconds=1000.4)
    collector.elapsed_ns = SECOND_NS
    collected = collector.collect(NOW_NS + SECOND_NS)
    (event,) = collected.events
    assert isinstance(event, DeviceEvent)
    assert (event.kind, event.device) == ("xid", "0000:9b:00.0")
    assert event.time_ns == NOW_NS + 400_000_000
    assert event.detail.startswith("critical: XID 95: uncontained memory error")
    assert series(collected)[total("xid", "95", "0000:9b:00.0")] == 1


@pytest.mark.parametrize("jump_seconds", [3600, -3600])
def test_a_jump_of_the_wall_clock_moves_no_event_relative_to_it(collector, device, jump_seconds):
    collector.collect(NOW_NS)
    device.write(xid(95), boot_seconds=1000.5)
    collector.elapsed_ns = SECOND_NS
    now_ns = NOW_NS + (1 + jump_seconds) * SECOND_NS
    (event,) = collector.collect(now_ns).events
    assert event.time_ns == now_ns - SECOND_NS // 2


def test_a_log_whose_clock_has_drifted_is_of_the_last_sweep(collector, device):
    collector.collect(NOW_NS)
    device.write(xid(95), boot_seconds=940)
    collector.elapsed_ns = SECOND_NS
    (event,) = collector.collect(NOW_NS + SECOND_NS).events
    assert event.time_ns == NOW_NS


def test_a_record_from_the_future_is_of_now(collector, device):
    collector.collect(NOW_NS)
    device.write(xid(95), boot_seconds=5000)
    (event,) = collector.collect(NOW_NS).events
    assert event.time_ns == NOW_NS


def test_a_flood_is_counted_fully_and_reported_once_a_minute(collector, device, series):
    collector.collect(NOW_NS)
    for _ in range(50):
        device.write(xid(31))
    assert event_list(collector.collect(NOW_NS)) == [("xid", "0000:9b:00.0")]
    collector.elapsed_ns = 30 * SECOND_NS
    device.write(xid(31))
    assert event_list(collector.collect(NOW_NS)) == []
    collector.elapsed_ns = 61 * SECOND_NS
    collected = collector.collect(NOW_NS)
    (event,) = collected.events
    assert isinstance(event, DeviceEvent)
    assert event.detail.endswith("(49 more since the last report)")
    assert series(collected)[total("xid", "31", "0000:9b:00.0")] == 51
    collector.elapsed_ns = 200 * SECOND_NS
    assert event_list(collector.collect(NOW_NS)) == []


def test_another_code_or_device_is_reported_separately(collector, device):
    collector.collect(NOW_NS)
    device.write(xid(31))
    device.write(xid(31, "0000:0f:00"))
    device.write(xid(13))
    assert len(collector.collect(NOW_NS).events) == 3


def test_series_are_bounded(collector, device, series):
    for number in range(400):
        device.write(f"nfs: server 10.0.{number // 256}.{number % 256} not responding, timed out")
    found = series(collector.collect(NOW_NS))
    counts = {name: value for name, value in found.items() if "nfs_not_responding" in name}
    assert len(counts) == 257
    assert sum(counts.values()) == 400
    assert counts[total("nfs_not_responding", "other", "other")] == 400 - 256


def test_a_log_that_is_opened_again_repeats_no_event(collector, device, series):
    collector.collect(NOW_NS)
    device.write(xid(79))
    assert len(collector.collect(NOW_NS).events) == 1
    device.rewind()
    device.write(xid(79))
    device.write(xid(94))
    collected = collector.collect(NOW_NS)
    assert [event.detail[:16] for event in collected.events] == ["warning: XID 94:"]
    assert series(collected)[total("xid", "79", "0000:9b:00.0")] == 1
    assert series(collected)["paceline_kernel_log_lost_total"] == 0


def test_overwritten_records_are_counted_as_lost(collector, device, series):
    device.write("first")
    device.write("after a gap", skip=7)
    assert series(collector.collect(NOW_NS))["paceline_kernel_log_lost_total"] == 7


def test_a_long_log_is_read_in_pieces_and_stays_old(context, tmp_path, series):
    log = tmp_path / "kern.log"
    log.write_text(f"kernel: {xid(13)}\n" * 5000)
    collector = ClockedKmsg(dataclasses.replace(context, kmsg_path=log))
    counts = []
    for _ in range(5):
        collected = collector.collect(NOW_NS)
        counts.append(series(collected)[total("xid", "13", "0000:9b:00.0")])
        assert collected.events == []
    assert counts[0] < 4000
    assert counts[-1] == 5000
    collector.close()


def test_a_killed_rank_is_named_after_it_is_gone(context, device, series):
    ranks = [LocalRank(job="llm", generation=2, rank=11, local_rank=3, pid=4242)]
    context = dataclasses.replace(context, kmsg_path=device.path, local_ranks=lambda: list(ranks))
    collector = ClockedKmsg(context)
    collector.collect(NOW_NS)
    ranks.clear()
    device.write("Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB")
    device.write("Out of memory: Killed process 5151 (java) total-vm:1kB")
    collected = collector.collect(NOW_NS)
    details = [event.detail for event in collected.events]
    assert details[0].endswith("[rank 11 of llm]")
    assert "rank" not in details[1]
    found = series(collected)
    assert found["paceline_rank_kernel_events_total{job=llm,kind=oom_kill,rank=11}"] == 1
    assert found[total("oom_kill", "cgroup", "host")] == 1
    collector.close()


def test_two_killed_processes_are_two_events(collector, device):
    collector.collect(NOW_NS)
    for pid in (1, 2):
        device.write(f"Out of memory: Killed process {pid} (python) total-vm:1kB")
    assert len(collector.collect(NOW_NS).events) == 2


def test_devices_have_their_usual_names(collector, context, device, sysfs, series):
    gpu = GpuInfo(index=3, uuid="GPU-3", name="H100", pci_bus_id="00000000:9B:00.0")
    context.inventory.gpus = (gpu,)
    for address, name in (("5c:00.0", "infiniband/mlx5_4"), ("02:00.0", "nvme/nvme1")):
        (sysfs / "bus/pci/devices" / f"0000:{address}" / name).mkdir(parents=True)
    collector.collect(NOW_NS)
    device.write(xid(79))
    device.write("mlx5_core 0000:5c:00.0: Port module event: module 0, Cable unplugged")
    device.write("nvme 0000:02:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer")
    collected = collector.collect(NOW_NS)
    assert [event.device for event in collected.events] == ["gpu3", "mlx5_4", "nvme1"]
    found = series(collected)
    assert found[total("xid", "79", "gpu3")] == 1
    assert not any(name.startswith("DCGM") for name in found), "NVML counts those of its GPUs"


def test_a_growing_file_is_followed_through_rotation(context, tmp_path, series):
    log = tmp_path / "kern.log"
    log.write_text("Feb 23 16:24:18 gpu-7 kernel: " + xid(13) + "\n")
    collector = ClockedKmsg(dataclasses.replace(context, kmsg_path=log))
    assert collector.collect(NOW_NS).events == []
    with log.open("a") as file:
        file.write("Feb 23 16:25:18 gpu-7 kernel: " + xid(48)[:20])
    assert collector.collect(NOW_NS).events == []
    with log.open("a") as file:
        file.write(xid(48)[20:] + "\n")
    assert event_list(collector.collect(NOW_NS)) == [("xid", "0000:9b:00.0")]
    log.rename(tmp_path / "kern.log.1")
    log.write_text("kernel: " + xid(94) + "\n")
    assert event_list(collector.collect(NOW_NS)) == [("xid", "0000:9b:00.0")]
    log.write_text("kernel: nvme nvme0: controller is down; will reset\n")
    collected = collector.collect(NOW_NS)
    assert event_list(collected) == [("nvme_down", "nvme0")]
    assert sum(value for name, value in series(collected).items() if "kind=xid" in name) == 3
    collector.close()


def test_a_replayed_log_is_reported_completely(context, series):
    log = LOGS / "xid-119.dmesg"
    context = dataclasses.replace(context, kmsg_path=log, replays_kmsg=True)
    collector = KmsgCollector(context)
    collected = collector.collect(NOW_NS)
    whole = parse(log.read_text().splitlines(), NOW_NS)
    assert collected.events == whole.events
    lost = {"paceline_kernel_log_lost_total": 0}
    assert series(collected) == series(whole) | lost
    collector.close()


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress, _as_utf16])
def test_a_log_that_is_packed_is_not_one_without_trouble(context, tmp_path, pack):
    log = tmp_path / "kern.log.2"
    log.write_bytes(pack(b"[1.5] NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.\n"))
    context = dataclasses.replace(context, kmsg_path=log, replays_kmsg=True)
    with pytest.raises(CollectorUnavailable, match=r"kern.log.2 is no text: unpack it first"):
        KmsgCollector(context).collect(NOW_NS)


def test_events_of_each_boot_of_a_long_log_are_reported(context, tmp_path):
    log = tmp_path / "kern.log"
    boots = ("99999.1", "500.1", "600.1", "20.5")
    text = "Mar  4 10:11:12 n1 kernel: [{}] NVRM: Xid (PCI:0000:9b:00): 79, off the bus\n"
    log.write_text("".join(text.format(seconds) for seconds in boots))
    context = dataclasses.replace(context, kmsg_path=log, replays_kmsg=True)
    assert len(KmsgCollector(context).collect(NOW_NS).events) == len(boots)


def test_garbage_is_survived(collector, device):
    device.write("\udcff\x00".encode("utf-8", "surrogateescape").decode("latin-1"))
    os.write(device._writer, b"\xff\xfe,,;;\n6,1,;\n;\n" + b"x" * 30000 + b"\n")
    device.write(xid(79), boot_seconds=2000)
    assert len(collector.collect(NOW_NS).events) == 1


def test_no_log(context, tmp_path):
    collector = KmsgCollector(dataclasses.replace(context, kmsg_path=tmp_path / "absent"))
    with pytest.raises(CollectorUnavailable, match="mount the host's"):
        collector.collect(NOW_NS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_a_log_that_may_not_be_read_says_what_would_help(context, tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("")
    log.chmod(0)
    collector = KmsgCollector(dataclasses.replace(context, kmsg_path=log))
    assert "CAP_SYSLOG" in _as_nobody(lambda: _why_unavailable(collector))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_a_device_that_may_not_be_opened_is_read_by_syslog(context, monkeypatch):
    """A container with CAP_SYSLOG may not open the mounted device."""
    line = f"<3>[ 1003.000000] {xid(79)}\n".encode()
    buffer = partial(KernelLogBuffer, lambda size_bytes: line, lambda: 1 << 17)
    monkeypatch.setattr("paceline_agent.collect.collectors.kmsg.KernelLogBuffer", buffer)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kmsg")
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(1, 11))
        except PermissionError:
            pytest.skip("no device can be created here")
        Path(scratch).chmod(0o755)
        collector = ClockedKmsg(dataclasses.replace(context, kmsg_path=path))
        found = _as_nobody(lambda: repr([event_list(collector.collect(NOW_NS)) for _ in range(2)]))
    assert found == repr([[("xid", "0000:9b:00.0")], []])


def _why_unavailable(collector: KmsgCollector) -> str:
    try:
        collector.collect(NOW_NS)
    except CollectorUnavailable as unavailable:
        return str(unavailable)
    return "it was read"


def _as_nobody(call: Callable[[], str]) -> str:
    """Run a call as `nobody`, in a child because a process cannot regain its privileges."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setuid(65534)
        os.write(write, call().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_the_log_of_this_machine_is_read_where_it_may_be(context):
    path = Path("/dev/kmsg")
    if not path.exists() or not stat.S_ISCHR(path.stat().st_mode):
        pytest.skip("no /dev/kmsg here")
    collector = KmsgCollector(dataclasses.replace(context, kmsg_path=path))
    try:
        collected = collector.collect(NOW_NS)
    except CollectorUnavailable:
        pytest.skip("it may not be read here")
    assert any(sample.name == "paceline_kernel_log_lost_total" for sample in collected.samples)
    collector.close()


def gpu(index: int, address: str, reports_xids: bool) -> GpuInfo:
    return GpuInfo(
        index=index, uuid=f"GPU-{index}", name="H200", pci_bus_id=address, reports_xids=reports_xids
    )


def test_the_log_stands_in_for_gpus_whose_xids_nvml_does_not_report(
    collector, context, device, series
):
    context.inventory.gpus = (
        gpu(0, "00000000:9B:00.0", reports_xids=False),
        gpu(1, "00000000:9C:00.0", reports_xids=False),
        gpu(2, "00000000:9D:00.0", reports_xids=True),
    )
    for code, address in ((119, "0000:9b:00"), (79, "0000:9b:00"), (48, "0000:9d:00")):
        device.write(xid(code, address))
    found = {
        name: value for name, value in series(collector.collect(NOW_NS)).items() if "DCGM" in name
    }
    by_gpu = {
        (name.split("{")[0], index): value
        for name, value in found.items()
        for index in range(3)
        if f"gpu={index}" in name and "xid=119" not in name
    }
    assert by_gpu == {
        ("DCGM_FI_DEV_XID_ERRORS", 0): 79,
        ("DCGM_EXP_XID_ERRORS_COUNT", 0): 1,
        ("DCGM_FI_DEV_XID_ERRORS", 1): 0,
    }, "NVML itself counts those of GPU 2: none may be counted twice"
    assert all("Hostname=" in name and "UUID=GPU-" in name for name in found)


FAULT = "NVRM: Xid (PCI:0000:9b:00): 43, pid={}, name=python, Ch 00000008"


def process_xids(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if "process_xids" in name}


@pytest.fixture
def node_of_rank_11(context, device, tmp_path):
    """A node whose rank 11 (pid 4242) has a child with pid 4300; 5151 is another process."""
    ranks = [LocalRank(job="llm", generation=2, rank=11, local_rank=3, pid=4242)]
    for pid, parent in ((4242, 1), (4300, 4242), (5151, 1)):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        stat = f"{pid} (python) S {parent} 1 1 0 -1"
        (tmp_path / "proc" / str(pid) / "stat").write_text(stat)
        (tmp_path / "proc" / str(pid) / "status").write_text(f"NSpid:\t{pid}\n")
    (tmp_path / "proc" / "1" / "ns").mkdir(parents=True)
    (tmp_path / "proc" / "1" / "ns" / "pid").symlink_to("pid:[4026531836]")
    return dataclasses.replace(
        context,
        kmsg_path=device.path,
        procfs_root=tmp_path / "proc",
        local_ranks=lambda: list(ranks),
    )


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("pid", "labels", "whose"),
    [
        ("4242", ",owner=llm/11", "[rank 11 of llm]"),
        ("4300", ",owner=llm/11", "[rank 11 of llm]"),
        ("5151", "", "[another process]"),
        ("'<unknown>'", None, ""),
    ],
)
def test_an_xid_is_attributed_to_its_process(
    node_of_rank_11, device, series, tmp_path, pid, labels, whose, is_gone
):
    collector = ClockedKmsg(node_of_rank_11)
    collector.collect(NOW_NS)
    if is_gone and pid.isdecimal():
        shutil.rmtree(tmp_path / "proc" / pid)
    device.write(FAULT.format(pid))
    collected = collector.collect(NOW_NS)
    name = "paceline_kernel_process_xids_total{code=43,device=0000:9b:00.0"
    expected = {} if labels is None else {f"{name}{labels}}}": 1.0}
    assert process_xids(series(collected)) == expected
    assert collected.events[0].detail.endswith(whose)
    collector.close()


def test_in_a_pid_namespace_no_xid_is_known_to_be_of_another_process(
    node_of_rank_11, device, series, tmp_path
):
    link = tmp_path / "proc" / "1" / "ns" / "pid"
    link.unlink()
    link.symlink_to("pid:[4026532500]")
    collector = ClockedKmsg(node_of_rank_11)
    collector.collect(NOW_NS)
    device.write(FAULT.format("5151"))
    assert process_xids(series(collector.collect(NOW_NS))) == {}
    collector.close()


def test_an_xid_of_a_rank_is_reported_although_another_process_had_the_same(
    node_of_rank_11, device
):
    collector = ClockedKmsg(node_of_rank_11)
    collector.collect(NOW_NS)
    device.write(FAULT.format("5151"))
    device.write(FAULT.format("4242"))
    details = [event.detail for event in collector.collect(NOW_NS).events]
    assert ["another process" in detail for detail in details] == [True, False]
    collector.close()
