"""Trainings of several ranks that copy their state to memory, and are killed.

Reads a line of JSON per training from standard input: directory, steps, and the directory of
copies of each rank. A training resumes, continues until that many steps are complete, waits until
the copy of the last one is complete (and sent, if there is another node), and is killed. The answer
is a line of JSON: for each rank where it resumed, at which step, and its weights, or its error.

Ranks are forked from this process, which has imported torch and what its optimizers import.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.checkpoints.checkpoints


def train(directory: Path, steps: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(64, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = paceline.Checkpoints(
        directory / "checkpoints", every=0, memory=True, model=model, optimizer=optimizer
    )
    copies = state._copies
    assert copies is not None

    def wait_for_copy() -> None:
        while not copies.is_off and (copies._is_writing or copies._sending is not None):
            time.sleep(0.001)

    for number in paceline.steps(range(1000), state=state):
        if state.step == steps:
            break
        wait_for_copy()  # so that none is left out
        loss = model(torch.full((4, 64), float(number))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wait_for_copy()
    weights = sum(p.double().sum().item() for p in model.parameters())
    return {"from": state.resumed_from, "step": state.resumed_step, "weights": float(weights).hex()}


def run_rank(rank: int, job: dict[str, Any], port: int, output: int) -> NoReturn:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(job["memory"])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PACELINE_RING_DIRECTORY": "",
        "PACELINE_MEMORY_DIRECTORY": job["memory"][rank],
        "PACELINE_MEMORY_OVERHEAD": "1000",
    }
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        result = train(Path(job["directory"]), job["steps"])
        dist.barrier()
    except BaseException:
        result = {"error": traceback.format_exc()}
    os.write(output, json.dumps(result).encode())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def run(job: dict[str, Any]) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(len(job["memory"])):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            run_rank(rank, job, port, writing)
        os.close(writing)
        ranks.append((pid, reading))
    results = []
    for pid, reading in ranks:
        with open(reading, "rb") as file:
            results.append(json.loads(file.read() or b"{}"))
        os.waitpid(pid, 0)
    return results


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
