"""A rank of a training that saves by torch.distributed.checkpoint and calls only `paceline.init`.

Writes `seen.RANK`, a JSON object of the checkpoint that its ring shows after each kind of save.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import hooks
from paceline_wire.ring import RingReader

directory = Path(os.environ["PACELINE_RING_DIRECTORY"])
rank = int(os.environ["RANK"])
seen: dict[str, int | None] = {}


class GatedWriter(dcp.FileSystemWriter):
    """Writes once the gate is open."""

    def __init__(self, path: Path, gate: threading.Event) -> None:
        super().__init__(path)
        self._gate = gate

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self._gate.wait()
        return super().write_data(*args, **kwargs)


class BrokenWriter(dcp.FileSystemWriter):
    """Cannot write on rank 1."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise OSError("no space left on device")
        return super().write_data(*args, **kwargs)


def saved_step() -> int | None:
    assert hooks._session is not None
    reader = RingReader(hooks._session.recorder.ring.path)
    view = reader.view()
    reader.close()
    return view.saved_step


def train(steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state() -> dict[str, Any]:
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def asynchronous(writer: dcp.FileSystemWriter) -> Any:
    return dcp.async_save(state(), storage_writer=writer, process_group=group)


def main() -> None:
    train(2)
    dcp.save(state(), checkpoint_id=directory / "step-2")
    seen["saved"] = saved_step()
    train(1)
    gate = threading.Event()
    future = asynchronous(GatedWriter(directory / "step-3", gate))
    train(2)
    seen["while it is saved asynchronously"] = saved_step()
    gate.set()
    future.result()
    seen["saved asynchronously"] = saved_step()
    for name, save in (("failed", dcp.save), ("failed asynchronously", asynchronous)):
        train(1)
        writer = BrokenWriter(directory / f"step-{len(seen) + 3}")
        try:
            if save is dcp.save:
                dcp.save(state(), storage_writer=writer)
            else:
                asynchronous(writer).result()
        except dcp.api.CheckpointException:  # on both ranks
            seen[name] = saved_step()
    train(1)
    torch.save(state(), directory / f"rank-{rank}.pt")
    seen["saved by each rank"] = saved_step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # DCP's own
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    paceline.init()
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    main()
    (directory / f"seen.{rank}").write_text(json.dumps(seen))
    paceline.finish()
    dist.destroy_process_group()
