"""Ranks as processes that record to rings, without an agent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.forked_python import ForkedPython
from tests.ports import free_port


def run_ranks(
    directory: Path, arguments: Sequence[object], world_size: int, seconds: float, **variables: str
) -> None:
    """Run one Python process per rank with these arguments; assert that each ends well.

    Args:
        directory: for their rings.
        arguments: of Python.
        world_size: number of ranks.
        seconds: time for each rank to end.
        variables: added to the environment.
    """
    port = free_port()
    ranks = [
        ForkedPython(
            arguments,
            os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PACELINE_RING_DIRECTORY": str(directory),
                "PACELINE_JOB": "local",
            }
            | variables,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=seconds)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
