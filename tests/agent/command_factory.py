"""Agents with other constants, commands for agents, and the processes that they start."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from paceline_wire.commands import RankSpec, StartRanks, StopGeneration
from paceline_wire.topology import Topology

_ids = count(1)


def start_ranks(
    code: str, ranks: int = 1, generation: int = 0, job: str = "job-a", **changes: Any
) -> StartRanks:
    command = StartRanks(
        command_id=next(_ids),
        job=job,
        generation=generation,
        topology=Topology(dp=ranks),
        ranks=[RankSpec(rank, rank) for rank in range(ranks)],
        argv=[sys.executable, "-c", code],
        master_address="127.0.0.1",
        master_port=29500,
    )
    return msgspec.structs.replace(command, **changes)


def stop(generation: int = 0, grace_seconds: float = 0.0, job: str = "job-a") -> StopGeneration:
    return StopGeneration(
        command_id=next(_ids), job=job, generation=generation, grace_seconds=grace_seconds
    )


def marker(agent: Any) -> str:
    return f"PACELINE_NODE_DIRECTORY={agent.directory}\0"


def with_constants(module: str, **constants: float) -> list[str]:
    """Return a command for `start_agent(under=...)`: the agent has other constants in a module."""
    code = (
        f"import runpy, sys, {module}\n"
        f"vars({module}).update({constants!r})\n"
        "sys.argv = sys.argv[3:]\n"  # without `-c`, the interpreter and `-m`
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    return [sys.executable, "-c", code]


# On a busy host, the usual four seconds after SIGTERM may be too few to send what is left.
SENDS_THE_REST = with_constants("paceline_agent.app", DRAIN_SECONDS=50.0)


def guard_pids(agent_pid: int) -> tuple[int, int]:
    """Return the pids of the sentinel and the guard."""

    def children(parent: int) -> list[int]:
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in text.split()]

    for child in children(agent_pid):
        if b"guard.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child, children(child)[0]
    raise AssertionError("no guard")
