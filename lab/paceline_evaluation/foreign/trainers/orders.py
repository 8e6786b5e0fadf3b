"""Faults of a training, ordered from outside while it runs.

The file named by the variable ORDERS has a list of objects with `fault`, and optionally `rank` (all
ranks without it), `after_step` and `seconds`. A fault that hangs blocks in a function of its name.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 128


class UnreadableBatchError(ValueError):
    """A batch cannot be parsed."""


class Orders:
    """The orders for one rank. Reading them costs one call of `stat` unless the file changed."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._path = os.environ.get("ORDERS", "")
        self._changed_ns = 0
        self._orders: list[dict[str, Any]] = []

    def find(self, fault: str, step: int) -> dict[str, Any] | None:
        """Return the order if this rank has the fault in this step."""
        self._read()
        for order in self._orders:
            concerns_it = order.get("rank") in (None, self.rank)
            if order["fault"] == fault and concerns_it and step > order.get("after_step", -1):
                return order
        return None

    def in_step(self, step: int) -> None:
        """Have the faults that occur between a forward and a backward."""
        self._read()
        for order in self._orders:
            function = IN_STEP.get(order["fault"])
            if function is not None and self.find(order["fault"], step) is order:
                function(order)

    def in_loader(self, batch: int) -> None:
        """Have the faults of the data set."""
        for fault, function in (("slow_data", slow), ("worker_leak", leak)):
            order = self.find(fault, batch)
            if order is not None:
                function(order)

    def _read(self) -> None:
        try:
            changed_ns = os.stat(self._path).st_mtime_ns
            if changed_ns != self._changed_ns:
                with open(self._path) as file:
                    self._orders = json.load(file)
                self._changed_ns = changed_ns
        except OSError:
            self._orders, self._changed_ns = [], 0


def slow(order: dict[str, Any]) -> None:
    time.sleep(order["seconds"])


def slow_compute(order: dict[str, Any]) -> None:
    matrix, until = torch.randn(128, 128), time.perf_counter() + order["seconds"]
    while time.perf_counter() < until:
        matrix = (matrix @ matrix).clamp(-1, 1)


def garbage(order: dict[str, Any]) -> None:
    """Leave cyclic garbage and collect it, for about the given time."""
    until = time.perf_counter() + order["seconds"]
    while time.perf_counter() < until:
        for _ in range(2000):
            cycle: list[Any] = []
            cycle.append(cycle)
        gc.collect()


def lock(order: dict[str, Any]) -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def endless(order: dict[str, Any]) -> None:
    number = 0
    while True:
        number += 1


def gil(order: dict[str, Any]) -> None:
    """Another thread holds the interpreter's lock: a regular expression that runs forever."""
    catastrophic = threading.Thread(
        target=lambda: re.match(r"(a+)+$", "a" * 64 + "b"), name="tokenizer"
    )
    catastrophic.start()
    time.sleep(0.01)


def read_socket(order: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def read_file(order: dict[str, Any]) -> None:
    reading, writing = os.pipe()
    os.fdopen(reading, "rb").read(1)
    os.close(writing)


def another_op(order: dict[str, Any]) -> None:
    dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * WIDTH), torch.ones(WIDTH))


def caught(order: dict[str, Any]) -> None:
    raise UnreadableBatchError("a batch that cannot be parsed")


def stop(order: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def error(order: dict[str, Any]) -> None:
    raise ValueError("bad batch 17")


def nccl_error(order: dict[str, Any]) -> None:
    """Raise what NCCL raises after an error of this rank's device."""
    raise dist.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3699, unhandled "
        "cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\n"
        "Cuda failure 214 'uncorrectable ECC error encountered'"
    )


def leak(order: dict[str, Any]) -> None:
    """Use more and more memory, until the kernel intervenes."""
    leaked = []
    while True:
        leaked.append(bytearray(os.urandom(1 << 20)) * 16)


def disconnect(order: dict[str, Any]) -> None:
    """Close the connections to other ranks, as a failing network does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # not a socket, or one that listens
            continue


IN_STEP: dict[str, Callable[[dict[str, Any]], None]] = {
    function.__name__: function
    for function in (
        *(slow, slow_compute, garbage, lock, endless, gil, read_socket, read_file, another_op),
        *(caught, stop, error, nccl_error, leak, disconnect),
    )
}


def retry_later() -> None:
    """Wait for a better batch, which never comes."""
    time.sleep(1_000_000)
