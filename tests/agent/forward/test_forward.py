"""Batches from the agent to the server: none is lost or stored twice, whatever the server does."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response

from paceline_agent.forward.spool import Spool
from paceline_wire.batch import AgentHello, Batch
from tests.agent.command_factory import SENDS_THE_REST

Fixture = Callable[..., Any]


def sequences(server: Any, boot: int = 0) -> list[int]:
    boots = list(dict.fromkeys(batch.boot_id for batch in server.batches))
    return [batch.sequence for batch in server.batches if batch.boot_id == boots[boot]]


def waiting(agent: Any) -> int:
    """Return the number of spooled files; one more batch may be in the slot."""
    return len(list((agent.directory / "spool").glob("*.batch")))


def test_after_an_outage_every_batch_is_stored_once_and_in_order(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    agent = start_agent(under=SENDS_THE_REST)
    wait_for(lambda: server.batches)
    server.stop()
    wait_for(lambda: waiting(agent) >= 3)
    before = len(server.batches)
    server.start()
    wait_for(lambda: len(server.batches) > before + 3)
    assert agent.stop() == 0
    found = sequences(server)
    assert found == list(range(len(found)))
    assert waiting(agent) == 0


def test_a_lost_answer_leads_to_a_duplicate_but_no_second_batch(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    answered: list[int] = []

    def lose_first_answers(batch: Batch) -> Response | None:
        """Store the batch and respond with 500, as if the connection broke after the commit."""
        if batch.sequence in answered:
            return None
        answered.append(batch.sequence)
        server._seen.add((batch.agent_id, batch.boot_id, batch.sequence))
        server.batches.append(batch)
        return Response(status_code=500)

    server.refuse = lose_first_answers
    agent = start_agent()
    wait_for(lambda: server.duplicates >= 3)
    assert agent.stop() == 0
    found = sequences(server)
    assert found == list(range(len(found)))


def test_a_rejected_batch_is_set_aside_and_the_others_are_sent(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    def refuse_some(batch: Batch) -> Response | None:
        refused = batch.sequence in (1, 2)
        kind = "application/problem+json"
        return JSONResponse({"title": "no"}, 422, media_type=kind) if refused else None

    server.refuse = refuse_some
    agent = start_agent()
    wait_for(lambda: len(server.batches) >= 3)
    agent.stop()
    assert sequences(server)[:2] == [0, 3]
    assert len(list((agent.directory / "spool" / "rejected").iterdir())) == 2
    assert agent.log_text().count("rejects batch") == 1


def test_a_wrong_token_loses_nothing(start_agent: Fixture, server: Any, wait_for: Fixture) -> None:
    attempts: list[int] = []

    def refuse_at_first(batch: Batch) -> Response | None:
        attempts.append(batch.sequence)
        return Response(status_code=401) if len(attempts) < 4 else None

    server.refuse = refuse_at_first
    agent = start_agent()
    wait_for(lambda: len(server.batches) >= 2)
    agent.stop()
    assert attempts[:4] == [0, 0, 0, 0]
    assert sequences(server)[:2] == [0, 1]
    assert agent.log_text().count("cannot send") == 1


def test_batches_of_a_killed_agent_are_sent_by_the_next_one(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    first = start_agent()
    wait_for(lambda: server.batches)
    server.stop()
    wait_for(lambda: waiting(first) >= 2)
    first.stop(signal.SIGKILL)
    left = len(Spool(first.directory / "spool", 64 << 20))
    before = len(server.batches)
    server.start()
    second = start_agent()
    wait_for(lambda: len(server.events(AgentHello)) == 2)
    second.stop()
    found = sequences(server, 0)
    assert found == list(range(before + left))
    assert sequences(server, 1)[0] == 0
    assert server.batches[before + left].events[0] == server.events(AgentHello)[1]


def test_an_idle_agent_keeps_sending_heartbeats(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    start_agent("--procfs-root", "/nonexistent", "--sysfs-root", "/nonexistent")
    wait_for(lambda: len(server.batches) >= 6)


def test_an_unwritable_spool_is_logged_once_and_batches_are_still_sent(
    start_agent: Fixture, server: Any, wait_for: Fixture, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "spool-file"
    in_the_way.write_text("")
    agent = start_agent("--spool-directory", str(in_the_way / "spool"))
    wait_for(lambda: len(server.batches) >= 3)
    assert agent.stop() == 0
    assert agent.log_text().count("cannot be written") == 1
    assert "Traceback" not in agent.log_text()


def test_a_silent_command_stream_is_reopened(
    start_agent: Fixture, server: Any, wait_for: Fixture
) -> None:
    server.silent = True
    start_agent()
    wait_for(lambda: server.streams_opened >= 2)
