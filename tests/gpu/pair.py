"""An ordinary data-parallel script of two ranks on one GPU, in which rank 1 fails."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FAULT_STEP = 60
HEALTHY_SECONDS = 0.02


def fail(how: str, tensor: torch.Tensor) -> None:
    match how:
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises an error":
            raise ValueError("sample 61 is empty")
        case "runs out of memory":
            torch.empty(1 << 50, device="cuda")
        case "has an illegal index":
            tensor[torch.tensor([tensor.numel()], device="cuda")] += 1
            torch.cuda.synchronize()
        case "loses its connections":
            close_connections()
        case "sleeps":
            time.sleep(1000)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "waits for another collective":
            dist.barrier()
            torch.cuda.synchronize()
        case "computes forever":
            torch.cuda._sleep(1 << 62)


def close_connections() -> None:
    """Break what NCCL has open: its sockets between ranks, not those of torch's store."""
    store = int(os.environ["MASTER_PORT"])
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if path.readlink().as_posix().startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    ports = connection.getsockname()[1], connection.getpeername()[1]
                    if store not in ports:
                        connection.shutdown(socket.SHUT_RDWR)


def main(how: str) -> None:
    rank = int(os.environ["RANK"])
    # NCCL refuses a GPU twice on one host. So it is made to see two, and uses sockets.
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(100_000):
        inputs = torch.randn(64, 256, device=device)
        loss = model(inputs).square().mean()
        loss.backward()
        if step == FAULT_STEP and rank == 1:
            fail(how, inputs.view(-1))
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        time.sleep(HEALTHY_SECONDS)


main(sys.argv[1])
