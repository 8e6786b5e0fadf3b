"""Permission for an agent of this user to read the Python stacks of this process.

Where Yama's ptrace_scope is 1, the default of most distributions, only ancestors may read them, and
an agent is no ancestor of a rank that a launcher starts. Nobody else gets the permission.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from paceline_wire.node_directory import own_agent

_PR_SET_PTRACER = 0x59616D61

_agent: int | None = None  # that may read this process


def allow_agent(rings: Path) -> None:
    """Let the agent that reads these rings, and py-spy that it starts, read this process."""
    global _agent
    _agent = own_agent(rings.parent)
    _allow()


def _allow() -> None:
    """Also called in forked processes, such as the workers of a data loader."""
    if _agent is not None:  # a kernel without Yama rejects the call, and needs no permission
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_agent), 0, 0, 0)


os.register_at_fork(after_in_child=_allow)
