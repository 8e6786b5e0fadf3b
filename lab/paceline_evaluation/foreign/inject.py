"""Inject faults into a foreign training: orders to its script, limits of the kernel, signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline_evaluation.faults import TrialFault
from paceline_evaluation.foreign.cluster import NODES, ForeignCluster
from paceline_evaluation.foreign.disturbance import start_hog
from paceline_evaluation.foreign.plan import Plan

_COUNTED_FROM = 0.2  # the arm's target is about faults of at least this share of the step
_CGROUPS = Path("/sys/fs/cgroup")
_LEAK_BYTES = 300 << 20
_SIGNALS = {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV, "sigterm": signal.SIGTERM}
# Text of the correct report: the function in which the rank is blocked, or how it ended.
_HEADLINES = {
    "stop": "SIGSTOP",
    "lock": "lock)",
    "left": "main)",
    "endless": "endless)",
    "gil": "tokenizer holds the GIL",
    "read_socket": "read_socket)",
    "read_file": "read_file)",
    "caught": "retry_later)",
    "another_op": "another_op)",
    "sigkill": "SIGKILL",
    "sigsegv": "SIGSEGV",
    "sigterm": "SIGTERM",
    "error": "bad batch 17",
    "nccl_error": "uncorrectable ECC error",
    "exit": "code 0",
    "leak": "out of memory",
    "disconnect": "onnection",
    "all_killed": "SIGKILL",
    "all_terminated": "SIGTERM",
    "reset": "onnection",
    "worker_leak": "loader worker",
}


class Injector:
    """Injects the fault of one trial; `cleanup` gets the calls that remove it."""

    def __init__(
        self,
        cluster: ForeignCluster,
        plan: Plan,
        ranks: list[dict[str, Any]],
        step_seconds: float,
        cleanup: ExitStack,
    ) -> None:
        self.cluster, self.plan, self.step_seconds = cluster, plan, step_seconds
        self.ranks = {rank["rank"]: rank for rank in ranks}
        self.cleanup = cleanup

    def inject(self, sent_bytes_per_step: float | None) -> TrialFault:
        """Inject the fault. Return it with step 0 as its onset.

        Args:
            sent_bytes_per_step: of the faulty rank's node, for a rate limit.
        """
        plan = self.plan
        special: dict[str, Callable[[], None]] = {
            "hog": self._hog,
            "leak": lambda: self._leak([self._pid(plan.faulty_rank)]),
            "worker_leak": lambda: self._leak(_children(self._pid(plan.faulty_rank))),
            "reset": self._reset,
            "all_killed": lambda: self._signal_all(signal.SIGKILL),
            "all_terminated": lambda: self._signal_all(signal.SIGTERM),
        }
        if plan.fault == "rate_limit":
            assert sent_bytes_per_step is not None
            self._limit(sent_bytes_per_step)
        elif plan.fault in special:
            special[plan.fault]()
        elif plan.fault in _SIGNALS:
            os.kill(self._pid(plan.faulty_rank), _SIGNALS[plan.fault])
        else:
            self._order(plan.fault)
        return self._fault()

    def _fault(self) -> TrialFault:
        plan = self.plan
        ranks: tuple[int, ...] = (plan.faulty_rank,)
        if plan.kind == "gc":
            ranks = ()
        elif plan.kind == "slow_link" or plan.fault.startswith("all_"):
            ranks = tuple(sorted(self.ranks))
        cause = "unknown"
        if plan.kind == "hang":
            cause = "mismatch" if plan.fault == "another_op" else "host"
        elif plan.fault in ("hog", "rate_limit"):
            cause = {"hog": "cpu", "rate_limit": "rate limit"}[plan.fault]
        return TrialFault(
            plan.kind,
            0,
            1.0 if plan.kind in ("hang", "crash") else plan.magnitude,
            ranks=ranks,
            node=self._node(plan.faulty_rank),
            cause=cause,
            way=plan.fault,
            headline=_HEADLINES.get(plan.fault, ""),
            counted_from=_COUNTED_FROM,
        )

    def has_ended(self, rank: int) -> bool:
        try:
            state = Path(f"/proc/{self._pid(rank)}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"

    def _pid(self, rank: int) -> int:
        return int(self.ranks[rank]["pid"])

    def _node(self, rank: int) -> int:
        return rank // (self.plan.ranks // NODES)

    def _order(self, fault: str) -> None:
        seconds = self.plan.magnitude * self.step_seconds
        if fault == "slow_data" and "--workers" in self.plan.surroundings.arguments:
            seconds += self.step_seconds  # a worker has the time of a step for each batch
        rank = None if self.plan.kind == "gc" else self.plan.faulty_rank
        order = {"fault": fault, "seconds": seconds, "rank": rank}
        whole = self.cluster.orders.with_suffix(".new")
        whole.write_text(json.dumps([order]))
        whole.replace(self.cluster.orders)
        self.cleanup.callback(self.cluster.orders.unlink, missing_ok=True)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in [self._pid(rank) for rank in self.ranks]:  # found first: all end at once
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _limit(self, sent_bytes_per_step: float) -> None:
        """Limit the node's traffic so that a step's bytes need `magnitude` of a step."""
        network, node = self.cluster.network, self._node(self.plan.faulty_rank)
        assert network is not None
        seconds = self.plan.magnitude * self.step_seconds
        network.limit(node, f"{max(1, int(8 * sent_bytes_per_step / seconds / 1000))}kbit")
        self.cleanup.callback(network.unlimit, node)

    def _hog(self) -> None:
        """Run another process on the CPU of the rank, with a weight relative to the rank's."""
        cpus = sorted(os.sched_getaffinity(0))
        cpu = cpus[self.plan.faulty_rank % len(cpus)]
        for thread in os.listdir(f"/proc/{self._pid(self.plan.faulty_rank)}/task"):
            os.sched_setaffinity(int(thread), {cpu})
        log = self.cluster.directory / "disturbance.log"
        hog = start_hog(log, self.cluster.environment())
        self.cleanup.callback(hog.wait)
        self.cleanup.callback(hog.kill)
        os.sched_setaffinity(hog.pid, {cpu})
        group = self._control_group("cpu")
        if (group / "cpu.shares").exists():
            (group / "cpu.shares").write_text(str(round(1024 * self.plan.magnitude)))
        else:
            (group / "cpu.weight").write_text(str(round(100 * self.plan.magnitude)))
        (group / "cgroup.procs").write_text(str(hog.pid))

    def _leak(self, pids: Sequence[int]) -> None:
        """Limit the memory of these processes, and have one of them use more and more."""
        group = self._control_group("memory")
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        limit = group / "memory.limit_in_bytes"
        limit = limit if limit.exists() else group / "memory.max"
        limit.write_text(str(pages * os.sysconf("SC_PAGE_SIZE") + _LEAK_BYTES))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        self._order(self.plan.fault)

    def _reset(self) -> None:
        """Have the kernel close the rank's connections to its peers."""
        network = self.cluster.network
        assert network is not None
        node = self._node(self.plan.faulty_rank)
        network.reset(node, self._pid(self.plan.faulty_rank), {self._pid(r) for r in self.ranks})

    def _control_group(self, controller: str) -> Path:
        """Return a new control group, of version 1 if this machine mounts its controllers."""
        parent = _CGROUPS / controller if (_CGROUPS / controller).is_dir() else _CGROUPS
        group = parent / f"paceline-{self.cluster.mark}"
        group.mkdir(exist_ok=True)
        self.cleanup.callback(_remove, group)
        return group


def why_no_control_groups() -> str | None:
    """Return why control groups cannot be made here; None if they can."""
    parent = _CGROUPS / "cpu" if (_CGROUPS / "cpu").is_dir() else _CGROUPS
    group = parent / f"paceline-try-{os.getpid()}"
    try:
        group.mkdir()
        has_weight = (group / "cpu.shares").exists() or (group / "cpu.weight").exists()
        group.rmdir()
    except OSError as error:
        return f"control groups cannot be made here: {error}"
    return None if has_weight else "control groups have no controller for CPUs here"


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def _remove(group: Path) -> None:
    """Remove a control group; the processes in it go to its parent."""
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):  # a killed process may not have left it yet
        group.rmdir()
