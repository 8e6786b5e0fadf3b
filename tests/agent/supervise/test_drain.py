"""SIGTERM to an agent: ranks that save a checkpoint on command do so before they are stopped."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_wire.batch import RankAcknowledged, RankAttached, RankExited
from tests.agent.command_factory import SENDS_THE_REST, start_ranks

Fixture = Callable[..., Any]

TRAIN = """
import itertools, os, sys, time
from pathlib import Path
import paceline
paceline.init()
{declare}
Path(os.environ["WORK"], os.environ["RANK"] + ".trains").touch()
for step in paceline.steps(itertools.count()):
    time.sleep(0.01)
    command = paceline.pending()
    if command is not None:
        assert command.kind == paceline.ControlKind.CHECKPOINT
        {answer}
"""
DECLARE = "paceline.declare(checkpoint=True)"
SAVE = (
    'Path(os.environ["WORK"], os.environ["RANK"] + ".saved").touch(); '
    "paceline.acknowledge(command.command_id, paceline.AckStatus.DONE, step)"
)
FAIL = "paceline.acknowledge(command.command_id, paceline.AckStatus.FAILED, step)"
HANG = 'Path(os.environ["WORK"], os.environ["RANK"] + ".asked").touch(); time.sleep(600)'


@pytest.fixture
def train(
    start_agent: Fixture, order: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> Callable[..., Any]:
    """Start two ranks on an agent, and wait until both train."""

    def start(*options: str, declare: str = DECLARE, answer: str = SAVE) -> Any:
        agent = start_agent(*options, under=SENDS_THE_REST)
        code = TRAIN.format(declare=declare, answer=answer)
        assert order(start_ranks(code, 2, environment={"WORK": str(tmp_path)})).ok
        wait_for(lambda: len(list(tmp_path.glob("*.trains"))) == 2)
        wait_for(lambda: len(server.events(RankAttached)) == 2)
        return agent

    return start


def left_by(directory: Path, what: str) -> list[str]:
    return sorted(path.stem for path in directory.glob(f"*.{what}"))


def exits(server: Any) -> list[tuple[int | None, bool]]:
    return [(event.signal, event.commanded) for event in server.events(RankExited)]


def test_ranks_save_a_checkpoint_before_their_agent_stops_them(
    train: Fixture, server: Any, tmp_path: Path
) -> None:
    assert train().stop() == 0
    assert left_by(tmp_path, "saved") == ["0", "1"]
    assert {event.status for event in server.events(RankAcknowledged)} == {"done"}
    assert all(event.drained for event in server.events(RankExited)), "stopped on request"
    assert exits(server) == [(signal.SIGTERM, False)] * 2, "the server restarts them elsewhere"


def test_ranks_that_cannot_save_are_stopped_without_being_asked(
    train: Fixture, server: Any, tmp_path: Path
) -> None:
    agent = train(declare="", answer=HANG)
    assert agent.stop() == 0
    assert left_by(tmp_path, "asked") == []
    assert exits(server) == [(signal.SIGTERM, False)] * 2


def test_a_checkpoint_that_fails_is_not_waited_for(train: Fixture, server: Any) -> None:
    assert train("--checkpoint-seconds", "600", answer=FAIL).stop() == 0
    assert {event.status for event in server.events(RankAcknowledged)} == {"failed"}
    assert len(exits(server)) == 2


def test_the_wait_for_a_checkpoint_is_bounded(train: Fixture, server: Any, tmp_path: Path) -> None:
    agent = train("--checkpoint-seconds", "1", answer=HANG)
    assert agent.stop() == 0
    assert "without the checkpoint that was requested" in agent.log_text()
    assert len(exits(server)) == 2


def test_a_second_sigterm_ends_the_wait(
    train: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> None:
    agent = train("--checkpoint-seconds", "600", answer=HANG)
    agent.process.send_signal(signal.SIGTERM)
    wait_for(lambda: left_by(tmp_path, "asked"))
    assert agent.stop() == 0
    assert len(exits(server)) == 2


def test_no_time_for_a_checkpoint_means_no_request(
    train: Fixture, server: Any, tmp_path: Path
) -> None:
    assert train("--checkpoint-seconds", "0", answer=HANG).stop() == 0
    assert left_by(tmp_path, "asked") == []
