"""A training of several ranks that are killed at random, and started again each time.

    python killed_runs.py KIND KILLS EPOCHS DIRECTORY TIER

The tier is what ranks resume from: disk; memory, of this node; peer: each half of the ranks is on a
node of its own, which is lost with its memory at each kill. Ranks append it to DIRECTORY/resumed.
Each rank appends a line per step to DIRECTORY/rankN: the step, the loss and the batch. At the end
it writes its weights and optimizer state to DIRECTORY/final.rankN. Ranks are forked from this
process, which has imported torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import paceline
import paceline.checkpoints.checkpoints
from paceline.checkpoints.memory import deferred

deferred.LEAST_BYTES = 1  # all parameters are copied while the next step computes
WIDTH = 8
EPOCHS = int(sys.argv[3])
SAMPLES = 96  # 12 batches of two ranks per epoch
TIER = sys.argv[5]
EVERY = 2 if TIER == "disk" else 0  # batches
RANKS = {
    "ddp": 2,
    "stateful": 2,
    "zero": 2,
    "compiled": 2,
    "accumulated": 2,
    "fsdp2": 2,
    "fsdp2_tp": 4,
    "pipelining": 2,
    "plain": 2,
}


class Model(nn.Module):
    """Two layers with dropout and batch statistics, which need random states and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.norm(self.first(x).relu()))
        out: Tensor = self.second(hidden)
        return out


class Log:
    """The lines and results that a rank writes."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / f"rank{rank}"
        self._final = directory / f"final.rank{rank}"
        self._resumed = directory / "resumed"
        self._is_first = True

    def step(self, step: int, loss: Tensor, batch: Any, resumed_from: str | None) -> None:
        if self._is_first:
            self._is_first = False
            with self._resumed.open("a") as file:
                file.write(f"{resumed_from}\n")
        whole = b"".join(part.contiguous().numpy().tobytes() for part in batch)
        line = f"{step} {loss.item().hex()} {hashlib.sha256(whole).hexdigest()[:12]}\n"
        with self._path.open("a") as file:
            file.write(line)

    def end(self, tensors: dict[str, Tensor]) -> None:
        content = {name: digest(tensor) for name, tensor in tensors.items()}
        self._final.write_text(json.dumps(content, indent=1))


def digest(tensor: Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(local.detach().contiguous().numpy().tobytes()).hexdigest()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, WIDTH, generator=generator),
    )


def sharded_loader(rank: int, ranks: int, kind: type[Any] = DataLoader) -> tuple[Any, Any]:
    sampler: Any = DistributedSampler(dataset(), num_replicas=ranks, rank=rank)
    return kind(dataset(), batch_size=4, sampler=sampler), sampler


def train_replicated(
    directory: Path,
    log: Log,
    wrap: Callable[[Model], Any],
    kind: Any,
    batches_per_step: int = 1,
) -> None:
    """Train a model whose replicas or shards exchange gradients."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = wrap(Model())
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    loader, sampler = sharded_loader(rank, 2, kind)
    state = paceline.Checkpoints(
        directory / "checkpoints",
        every=ceil(EVERY / batches_per_step),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
    )
    data = loader, sampler
    train(state, log, model, optimizer, data, scheduler.step, batches_per_step)


def train(
    state: paceline.Checkpoints,
    log: Log,
    model: Any,
    optimizer: torch.optim.Optimizer,
    data: tuple[Any, Any],
    end_epoch: Callable[[], object] = lambda: None,
    batches_per_step: int = 1,
) -> None:
    """Train all epochs; `data` is the loader and its sampler."""
    loader, sampler = data
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(paceline.steps(loader, state=state), 1):
            is_last = number % batches_per_step == 0  # a resume begins after a step
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = (model(x) - y).square().mean() / batches_per_step
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            log.step(state.step, loss.detach(), (x, y), state.resumed_from)
        end_epoch()
    state.wait()
    finish(log, model.state_dict(), optimizer)


def ddp(directory: Path, log: Log) -> None:
    train_replicated(directory, log, DistributedDataParallel, DataLoader)


def stateful(directory: Path, log: Log) -> None:
    train_replicated(directory, log, DistributedDataParallel, StatefulDataLoader)


def compiled(directory: Path, log: Log) -> None:
    """Train a compiled module, whose parameters have a prefix before their names."""

    def wrap(model: Model) -> Any:
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")

    train_replicated(directory, log, wrap, DataLoader)


def accumulated(directory: Path, log: Log) -> None:
    """Train with an optimizer step every third batch; gradients are exchanged only there."""
    train_replicated(directory, log, DistributedDataParallel, DataLoader, batches_per_step=3)


def zero(directory: Path, log: Log) -> None:
    """Train replicas whose optimizer states are sharded, with a rate that changes at each step."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(Model())
    torch.manual_seed(100 + rank)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    state = paceline.Checkpoints(
        directory / "checkpoints",
        every=EVERY,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
    )
    train(state, log, model, optimizer, sharded_loader(rank, 2))


def fsdp2(directory: Path, log: Log) -> None:
    def wrap(model: Model) -> Any:
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    train_replicated(directory, log, wrap, DataLoader)


def fsdp2_tp(directory: Path, log: Log) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, sampler = sharded_loader(mesh.get_local_rank("dp"), 2)
    state = paceline.Checkpoints(
        directory / "checkpoints", every=EVERY, model=model, optimizer=optimizer
    )
    train(state, log, model, optimizer, (loader, sampler))


def pipelining(directory: Path, log: Log) -> None:
    """Train two stages whose parameters have the same names, with a shuffled loader each."""
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    stage_module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, y: (out - y).square().mean())
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7)  # all stages read the same batches
    loader = DataLoader(dataset(), batch_size=8, shuffle=True, generator=generator)
    state = paceline.Checkpoints(
        directory / "checkpoints", every=EVERY, stage=[stage_module], optimizer=optimizer
    )
    for _ in state.epochs(EPOCHS):
        for x, y in paceline.steps(loader, state=state):
            losses: list[Tensor] = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            loss = torch.stack(losses).mean() if losses else torch.zeros(())
            log.step(state.step, loss.detach(), (x, y), state.resumed_from)
    state.wait()
    finish(log, stage_module.state_dict(), optimizer)


def plain(directory: Path, log: Log) -> None:
    """Train plain tensors by hand: a different one per rank, and a momentum in a dict."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    weight, bias = torch.randn(WIDTH, WIDTH), torch.zeros(WIDTH)
    momentum: dict[str, Any] = {"weight": torch.zeros(WIDTH, WIDTH), "steps": 0}

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(12 * EPOCHS):
            yield torch.randn(4, WIDTH), torch.randn(4, WIDTH)

    state = paceline.Checkpoints(
        directory / "checkpoints", every=EVERY, weight=weight, bias=bias, momentum=momentum
    )
    for x, y in paceline.steps(batches(), state=state):
        error = x @ weight + bias - y
        gradient = x.T @ error / len(x)
        dist.all_reduce(bias.add_(error.mean(0), alpha=-0.01))
        bias /= 2
        momentum["weight"].mul_(0.9).add_(gradient)
        momentum["steps"] += 1
        weight.add_(momentum["weight"], alpha=-0.01)
        log.step(state.step, error.square().mean(), (x, y), state.resumed_from)
    state.wait()
    log.end({"weight": weight, "bias": bias, "steps": torch.tensor(momentum["steps"])})


def finish(log: Log, model: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    tensors = model | {"rate": torch.tensor(optimizer.param_groups[0]["lr"])}
    own = getattr(optimizer, "optim", optimizer)  # a ZeroRedundancyOptimizer's part of this rank
    for number, values in own.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
    log.end(tensors)


# The launcher

lost_nodes: list[int] = []


def node_of(kind: str, rank: int) -> int:
    return 0 if TIER != "peer" else 2 * rank // RANKS[kind]


def memory_of(directory: Path, node: int) -> str:
    """Return the directory of copies on a node, or on the one that replaced it."""
    return "" if TIER == "disk" else str(directory / f"memory-{node}-{lost_nodes.count(node)}")


def run_rank(kind: str, directory: Path, rank: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS[kind]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PACELINE_RING_DIRECTORY": "",
        "PACELINE_MEMORY_DIRECTORY": memory_of(directory, node_of(kind, rank)),
        "PACELINE_MEMORY_OVERHEAD": "100",  # as often as the threads can
    }
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    attempt = dist.PrefixStore(os.environ["ATTEMPT"], store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=RANKS[kind])
    {
        "ddp": ddp,
        "stateful": stateful,
        "zero": zero,
        "compiled": compiled,
        "accumulated": accumulated,
        "fsdp2": fsdp2,
        "fsdp2_tp": fsdp2_tp,
        "pipelining": pipelining,
        "plain": plain,
    }[kind](directory, Log(directory, rank))
    dist.barrier()  # no rank leaves while another one still trains
    dist.destroy_process_group()


def start(kind: str, directory: Path, port: int, attempt: int) -> list[int]:
    os.environ["ATTEMPT"] = f"attempt{attempt}"
    pids = []
    for rank in range(RANKS[kind]):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                path = directory / f"errors.rank{rank}"
                errors = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(errors, 1)
                os.dup2(errors, 2)
                run_rank(kind, directory, rank, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def host_store() -> tuple[int, int]:
    """Start the store in a process of its own. Return its pid and port.

    Its threads take locks of the C library, which ranks must not be forked with.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    return pid, int(os.read(reading, 16))


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def main(kind: str, kills: int, directory: Path) -> None:
    directory.mkdir()
    store, port = host_store()
    try:
        launch(kind, kills, directory, port)
    finally:
        os.kill(store, signal.SIGKILL)


def launch(kind: str, kills: int, directory: Path, port: int) -> None:
    chance = random.Random(f"{kind} {kills}")
    for attempt in range(kills + 1):
        pids = start(kind, directory, port, attempt)
        victim = chance.randrange(len(pids))
        path = directory / f"rank{chance.randrange(len(pids))}"
        goal = lines(path) + chance.randint(2, 7)
        pause = chance.random() * 0.02
        alive = dict(enumerate(pids))
        codes = {}
        while alive:
            if attempt < kills and lines(path) >= goal:
                time.sleep(pause)  # anywhere in the step, or in the save
                os.kill(pids[victim], signal.SIGKILL)
                break
            for rank, pid in list(alive.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del alive[rank]
            if any(codes.values()):
                break
            time.sleep(0.001)
        for pid in alive.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if TIER == "peer" and alive:
            node = node_of(kind, victim)
            shutil.rmtree(memory_of(directory, node), ignore_errors=True)
            lost_nodes.append(node)
        if any(codes.values()):
            sys.exit("".join(path.read_text() for path in sorted(directory.glob("errors.*"))))
        if not alive:
            print(f"ended after {attempt} kills")
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[4]))
