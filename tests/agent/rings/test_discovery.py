"""A script with only the two lines and no environment variables is found by its node's agent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_wire.batch import RankAttached

Fixture = Callable[..., Any]

SCRIPT = """
import sys
from pathlib import Path
from paceline_wire import node_directory
node_directory.MEMORY = Path(sys.argv[1])

import paceline
paceline.init()
for batch in paceline.steps(range(5)):
    pass
"""


def train(memory: Path, **options: Any) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(memory)]
    subprocess.run(command, check=True, env=environment, timeout=120, **options)


def attached(server: Any) -> list[int]:
    return [event.identity.pid for event in server.events(RankAttached)]


@pytest.mark.parametrize(
    "user",
    [
        None,
        pytest.param(
            65534,
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user"),
        ),
    ],
)
def test_two_lines_in_a_script_are_enough(
    open_directory: Path, start_agent: Fixture, server: Any, wait_for: Fixture, user: int | None
) -> None:
    options = ["--node-directory", str(open_directory / "paceline-node-0")]
    agent = start_agent(*options)
    wait_for(lambda: server.batches)
    try:
        train(open_directory, user=user)
    except PermissionError:
        pytest.skip("this Python is root's alone")
    wait_for(lambda: attached(server))
    assert agent.stop() == 0
    rings = open_directory / "paceline-node-0" / "rings"
    left = list(rings.iterdir())  # the first run's, if the agent had no time to remove it
    train(open_directory, user=user)
    assert list(rings.iterdir()) == left
