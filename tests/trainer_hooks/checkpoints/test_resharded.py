"""A checkpoint of one number of ranks is loaded by another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.ports import free_port

PROGRAM = Path(__file__).with_name("resharded_run.py")


def run(directory: Path, ranks: int, steps: int) -> set[str]:
    """Run the program. Return the lines that its ranks print."""
    port = free_port()
    processes = [
        ForkedPython(
            [PROGRAM, directory, steps],
            os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "PACELINE_RING_DIRECTORY": "",
            },
        )
        for rank in range(ranks)
    ]
    lines = set()
    for process in processes:
        output, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
        lines.add(output.strip())
    return lines


@pytest.mark.campaign
def test_parameters_and_optimizer_states_of_two_ranks_are_loaded_by_three(tmp_path: Path) -> None:
    (two,) = run(tmp_path, 2, steps=4)
    # 4 batches of 2 ranks are 2 of 3 ranks (rounded down): with 2 left out, none remain of 2.
    (three,) = run(tmp_path, 3, steps=2)
    assert two.startswith("4 ")
    assert three == two
