"""A rank pool (see conftest): imports torch once and forks.

Each member runs the jobs that it receives.

python worker.py PORT IN,OUT ...     PORT: of the test's TCPStore; a pair of pipes per member
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from paceline_trainer.train import train


def work(port: int, orders: int, answers: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    with os.fdopen(orders, "rb") as todo, os.fdopen(answers, "wb") as done:
        while True:
            name, settings, place = pickle.load(todo)
            try:
                answer = train(settings, place, PrefixStore(name, store))
            except Exception:
                answer = traceback.format_exc()
                if dist.is_initialized():
                    dist.destroy_process_group()
            pickle.dump(answer, done)
            done.flush()


def main(port: int, pipes: list[tuple[int, int]]) -> None:
    members = []
    for orders, answers in pipes:
        member = os.fork()
        if not member:
            with contextlib.suppress(EOFError):
                work(port, orders, answers)
            os._exit(0)
        members.append(member)
    for member in members:
        os.waitpid(member, 0)


if __name__ == "__main__":
    pairs = [argument.split(",") for argument in sys.argv[2:]]
    main(int(sys.argv[1]), [(int(orders), int(answers)) for orders, answers in pairs])
