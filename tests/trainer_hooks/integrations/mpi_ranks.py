"""A training over MPI, as Horovod does it: no process group of torch. It does not know Paceline."""

from __future__ import annotations

import time

import torch
from mpi4py import MPI

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            world.Allreduce(MPI.IN_PLACE, parameter.grad.numpy(), op=MPI.SUM)
        optimizer.step()
        time.sleep(0.01)
