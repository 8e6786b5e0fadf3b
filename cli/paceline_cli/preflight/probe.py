"""The micro-benchmarks of one rank: its device, then all-reduces with changing sets of nodes.

Each set of nodes is a separate process group over one store, so that a pair without a connection
loses only its own measurement. Needs torch.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not exported
from torch.distributed.distributed_c10d import PrefixStore

from paceline_cli.preflight.network_facts import addresses
from paceline_cli.preflight.plan import (
    BenchmarkPlan,
    Compute,
    Exchange,
    FailedNode,
    Result,
    Transport,
    line,
    pair_rounds,
    scale_steps,
)
from paceline_cli.preflight.reach import Unreachable, connect, listen, outcome

_SMALL_BYTES = 8
_LATENCY_REPEATS = 20
_BANDWIDTH_REPEATS = 5
_FIRST_BYTES = 64 << 10
# duration of the smallest all-reduce: its data exceeds the buffers on the path
_LONG_ENOUGH_SECONDS = 0.05
_MATMUL_SIDE = {"cpu": 512, "cuda": 8192}
_COPIED_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_PINNED_BYTES = 256 << 20
_MEETINGS = 6.0  # multiple of the patience: gloo tries to connect for five times the patience
_UNREACHED = "unreached"
_POLL_SECONDS = 0.005
_SHOWN_CHARACTERS = 160
_NETWORK = re.compile(r"Using network (\S+)")


class ProbeRank:
    """One process of the micro-benchmarks."""

    def __init__(self, plan: BenchmarkPlan, node: int, local_rank: int) -> None:
        self.plan, self.node, self.local_rank = plan, node, local_rank
        self.rank = plan.ranks_of(node)[local_rank]
        cuda = plan.backend == "nccl"
        self.device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        self.patience = timedelta(seconds=plan.patience_seconds)
        self.store = TCPStore(
            plan.address,
            plan.port,
            world_size=None,
            is_master=self.rank == 0,
            timeout=_MEETINGS * self.patience,
            wait_for_workers=False,
        )
        self.absent_from: str | None = None  # on rank 0: the last barrier that some ranks missed
        self.present: list[int] = []  # nodes present at the start

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store.set(f"here/{self.rank}", "1")
        self.meet("start")
        self.present = self.who_is_here()
        tell(self.compute())
        if self.plan.ranks_of_nodes[self.node] > 1:
            self.exchange("node", [self.node])
        for number, pairs in enumerate(pair_rounds(len(self.plan.nodes))):
            if number == self.plan.rounds:
                break
            self.meet(f"pairs {number}")
            for pair in pairs:
                if self.node in pair:
                    self.exchange("pair", pair)
        for count in scale_steps(len(self.present)):
            self.meet(f"scale {count}")
            if self.node in self.present[:count]:
                self.exchange("scale", self.present[:count])
        self.leave()

    def meet(self, name: str) -> None:
        """Wait for all ranks; ranks that do not arrive are waited for only once.

        The timeout is longer than a failing group blocks its ranks; otherwise those would always be
        late.
        """
        self.store.add(f"meeting/{name}", 1)
        if self.rank == 0:
            came = self.wait_for(f"meeting/{name}")
            self.absent_from = None if came == self.plan.world_size else f"meeting/{name}"
            self.store.set(f"meeting/{name}/begins", "1")
        self.store.wait([f"meeting/{name}/begins"], 2 * _MEETINGS * self.patience)

    def who_is_here(self) -> list[int]:
        """Return the nodes whose ranks have all started, as determined by rank 0."""
        if self.rank == 0:
            here = [
                str(node)
                for node in range(len(self.plan.nodes))
                if self.store.check([f"here/{rank}" for rank in self.plan.ranks_of(node)])
            ]
            self.store.set("present", ",".join(here))
        listed = self.store.get("present").decode()
        return [int(node) for node in listed.split(",")] if listed else []

    def leave(self) -> None:
        """End the rank; rank 0 ends last, because the store ends with it."""
        self.store.add("left", 1)
        if self.rank == 0:
            self.wait_for("left")

    def wait_for(self, key: str) -> int:
        """Return how many ranks arrived; ranks that missed the last barrier may never return."""
        until = time.monotonic() + _MEETINGS * self.plan.patience_seconds
        while True:
            last = self.plan.world_size
            if self.absent_from is not None:
                last = self.store.add(self.absent_from, 0)
            came = self.store.add(key, 0)
            if came >= last or time.monotonic() > until:
                return came
            time.sleep(_POLL_SECONDS)

    def compute(self) -> Compute:
        kind = self.device.type
        side = _MATMUL_SIDE[kind]
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        left = torch.randn(side, side, device=self.device, dtype=dtype)
        product = torch.empty_like(left)
        matmul = self.rate(lambda: torch.mm(left, left, out=product))
        source = torch.zeros(_COPIED_BYTES[kind], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copies = self.rate(lambda: target.copy_(source))
        to_device = None
        if kind == "cuda":
            pinned = torch.zeros(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            into = target[:_PINNED_BYTES]
            transfers = self.rate(lambda: into.copy_(pinned, non_blocking=True))
            to_device = transfers * _PINNED_BYTES
        return Compute(
            node=self.plan.nodes[self.node],
            device=str(self.device),
            matmul_flops_per_second=matmul * 2 * side**3,
            memory_bytes_per_second=copies * 2 * source.numel(),
            host_to_device_bytes_per_second=to_device,
        )

    def rate(self, work: Callable[[], object]) -> float:
        """Return runs of `work` per second, from the median duration of a run."""
        work()
        self.finish()
        took: list[float] = []
        until = time.perf_counter() + self.plan.seconds
        while not took or time.perf_counter() < until:
            started = time.perf_counter()
            work()
            self.finish()
            took.append(time.perf_counter() - started)
        return 1 / statistics.median(took)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exchange(self, kind: Any, nodes: Sequence[int]) -> None:
        ranks = [rank for node in nodes for rank in self.plan.ranks_of(node)]
        names = [self.plan.nodes[node] for node in nodes]
        result: Exchange
        absent = [name for node, name in zip(nodes, names, strict=True) if node not in self.present]
        if absent:
            error = f"{', '.join(absent)} did not come"
            tell(Exchange(nodes=names, kind=kind, error=error))
            return
        try:
            if kind == "pair":
                self.reach(nodes)
            elif self.store.check([_UNREACHED]):
                raise Unreachable("left out, since a pair does not reach each other")
            group = ProbeGroup(self, f"{kind}/{'-'.join(map(str, nodes))}", ranks)
            latency = group.latency_seconds()
            size, seconds = group.bandwidth()
            bus = 2 * (len(ranks) - 1) / len(ranks) * size / seconds
            result = Exchange(
                nodes=names,
                kind=kind,
                latency_seconds=latency,
                bus_bytes_per_second=bus,
                size_bytes=size,
            )
        except RuntimeError as error:  # raised by both backends, also on timeouts
            if kind == "pair":
                self.store.set(_UNREACHED, "1")
            result = Exchange(nodes=names, kind=kind, error=in_short(error))
        if self.rank == ranks[0] or (result.error is not None and self.local_rank == 0):
            tell(result)

    def reach(self, pair: Sequence[int]) -> None:
        """Connect the two nodes of a pair. Raises Unreachable."""
        key = f"reach/{pair[0]}-{pair[1]}"
        first, second = (self.plan.ranks_of(node)[0] for node in pair)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        own = next(iter(addresses(interface)), None)
        if own is None and self.rank in (first, second):
            raise Unreachable(f"{self.plan.nodes[self.node]} has no address on {interface!r}")
        if self.rank == first and own is not None:
            listen(self.store, key, own.partition("/")[0], self.plan.patience_seconds)
        elif self.rank == second:
            connect(self.store, key, self.plan.patience_seconds)
        outcome(self.store, key)


class ProbeGroup:
    """A process group of some ranks, and all-reduces within it."""

    def __init__(self, rank: ProbeRank, name: str, ranks: Sequence[int]) -> None:
        self._rank, self._plan = rank, rank.plan
        store = PrefixStore(name, rank.store)
        own, size = ranks.index(rank.rank), len(ranks)
        self._group: Any
        if self._plan.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = rank.patience
            self._group = dist.ProcessGroupNCCL(store, own, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, own, size, rank.patience)

    def latency_seconds(self) -> float:
        """Return the median of small all-reduces on the slowest rank."""
        small = torch.zeros(_SMALL_BYTES // 4, device=self._rank.device)
        self._timed(small)
        return self._slowest(statistics.median(self._timed(small) for _ in range(_LATENCY_REPEATS)))

    def bandwidth(self) -> tuple[int, float]:
        """Return (bytes, seconds) of the best of several sufficiently long all-reduces."""
        size = _FIRST_BYTES
        while True:
            tensor = torch.zeros(size // 4, device=self._rank.device)
            self._timed(tensor)  # fills buffers and uses up the burst of a rate limiter
            seconds = self._slowest(self._timed(tensor))
            if seconds >= _LONG_ENOUGH_SECONDS or size >= self._plan.bytes_at_most:
                break
            factor = 2 if seconds > _LONG_ENOUGH_SECONDS / 8 else 4
            size = min(size * factor, self._plan.bytes_at_most)
        rest = [self._slowest(self._timed(tensor)) for _ in range(_BANDWIDTH_REPEATS - 1)]
        return size, min(seconds, *rest)

    def _timed(self, tensor: torch.Tensor) -> float:
        started = time.perf_counter()
        self._group.allreduce([tensor]).wait()
        self._rank.finish()
        return time.perf_counter() - started

    def _slowest(self, seconds: float) -> float:
        result = torch.tensor([seconds], dtype=torch.float64, device=self._rank.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([result], options).wait()
        return float(result.item())


def in_short(error: RuntimeError) -> str:
    """Return the first line of an error, without source locations and stacks."""
    first = (str(error).splitlines() or [repr(error)])[0]
    return re.sub(r"\[/[^\]]*\]:? ?", "", first)[:_SHOWN_CHARACTERS]


def tell(result: Result) -> None:
    os.write(sys.stdout.fileno(), (line(result) + "\n").encode())  # one write: not interleaved


def main(arguments: Sequence[str]) -> None:
    plan = BenchmarkPlan.decode(arguments[0])
    node, local_rank = int(arguments[1]), int(arguments[2])
    signal.alarm(int(plan.deadline_seconds))  # also if no other process can end this one
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // plan.ranks_of_nodes[node]))
    with tempfile.TemporaryDirectory(prefix="paceline-preflight-") as directory:
        log = Path(directory) / "nccl.log"
        if plan.backend == "nccl":  # before NCCL is first called
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
            # A collective that hangs must raise an error instead of ending the process.
            os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        try:
            ProbeRank(plan, node, local_rank).run()
        except RuntimeError as error:  # no peer, no device, or out of memory
            tell(FailedNode(node=plan.nodes[node], error=in_short(error)))
        match = _NETWORK.search(log.read_text(errors="replace")) if log.exists() else None
        if match is not None and local_rank == 0:
            tell(Transport(node=plan.nodes[node], network=match[1]))
    sys.stdout.flush()
    os._exit(0)  # an orderly exit would wait for groups that timed out


if __name__ == "__main__":
    main(sys.argv[1:])
