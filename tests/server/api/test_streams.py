"""Long-lived responses: commands to agents and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from simulated_node import bearer, hello, post_job

from paceline_server.decide.types import IssuedCommand
from paceline_server.store.changes import prune_changes, record_change
from paceline_server.store.commands import issue, withdraw
from paceline_server.store.models import NodeRow
from paceline_server.store.tokens import Scope, create_token, revoke_token
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, CommandResult
from paceline_wire.commands import Burst, ControlRanks, Ping, StopGeneration, decode_line

Event = tuple[int, str, Any]


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    return run_server(role="api")


def events(answer: httpx.Response) -> Iterator[Event]:
    """Yield (id, event, data) of each event."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def stream(server: Any, path: str, **headers: str) -> Any:
    own = bearer(server.url, "agent") if path.endswith("/commands") else {}
    return httpx.stream("GET", server.url + path, headers=own | headers, timeout=60.0)


def put_command(server: Any, job_id: str, command: Any, agent: str = "node-0") -> None:
    with server.program.database.write() as session:
        issued = IssuedCommand(agent_id=agent, action_id="act-1", command=command)
        issue(session, job_id, issued, 1)
    server.program.signals.commands.notify()


def stop(command_id: int, job_id: str) -> StopGeneration:
    return StopGeneration(command_id=command_id, job=job_id, generation=1)


def test_pending_commands_come_first_then_new_ones_until_their_result(server: Any) -> None:
    job_id = post_job(server.url)
    put_command(server, job_id, stop(7, job_id))
    put_command(server, job_id, stop(5, job_id))
    put_command(server, job_id, stop(6, job_id), agent="node-1")
    with stream(server, "/api/v1/agents/node-0/commands") as answer:
        lines = (decode_line(line) for line in answer.iter_lines())
        commands = (line for line in lines if not isinstance(line, Ping))
        assert [next(commands).command_id for _ in range(2)] == [5, 7]
        put_command(server, job_id, stop(9, job_id))
        assert next(commands).command_id == 9
    finish(server, 5, "node-0")
    finish(server, 7, "node-1")  # another agent's command
    with stream(server, "/api/v1/agents/node-0/commands") as answer:
        lines = (decode_line(line) for line in answer.iter_lines())
        commands = (line for line in lines if not isinstance(line, Ping))
        assert [next(commands).command_id for _ in range(2)] == [7, 9]


@pytest.mark.any_database
def test_a_burst_reaches_the_agent_of_a_node_that_holds_ranks(server: Any) -> None:
    job_id = post_job(server.url)
    node = {"agent_id": "node-0", "boot_id": "boot", "sequence": 0, "packed_ns": 1}
    with server.program.database.write() as session:
        session.add(NodeRow(**node, last_seen_ns=1, hello=hello(), readings={}, dropped_batches=0))
    url = f"{server.url}/api/v1/nodes/node-0/burst"
    idle = server.client.post(url, json={})
    assert (idle.status_code, "has no ranks" in idle.text) == (409, True)
    with server.program.database.write() as session:
        session.get_one(NodeRow, "node-0").job_id = job_id
    assert server.client.post(url, json={"seconds": 31}).status_code == 422
    server.client.post(url, json={"collectors": ["nvml"], "seconds": 5}).raise_for_status()
    with stream(server, "/api/v1/agents/node-0/commands") as answer:
        lines = (decode_line(line) for line in answer.iter_lines())
        asked = next(line for line in lines if not isinstance(line, Ping))
    assert isinstance(asked, Burst)
    assert (asked.collectors, asked.seconds) == (["nvml"], 5.0)


def finish(server: Any, command_id: int, agent: str) -> None:
    result = CommandResult(time_ns=1, command_id=command_id, ok=True)
    batch = Batch(agent_id=agent, boot_id="boot", sequence=command_id, packed_ns=1, events=[result])
    httpx.post(
        f"{server.url}/api/v1/ingest",
        content=wire.encode(batch),
        headers={"Content-Type": wire.CONTENT_TYPE, **bearer(server.url, "agent")},
        timeout=60,
    ).raise_for_status()


@pytest.mark.any_database
def test_commands_superseded_by_a_newer_generation_are_not_sent(server: Any) -> None:
    job_id = post_job(server.url)
    old = ControlRanks(command_id=1, job=job_id, generation=1, kind="checkpoint", target_step=10)
    put_command(server, job_id, old)
    put_command(server, job_id, stop(2, job_id))
    with server.program.database.write() as session:
        withdraw(session, job_id, 2, 1)
    with stream(server, "/api/v1/agents/node-0/commands") as answer:
        lines = (decode_line(line) for line in answer.iter_lines())
        assert next(line for line in lines if not isinstance(line, Ping)).command_id == 2


@pytest.mark.any_database
def test_idle_command_stream_sends_pings(server: Any) -> None:
    with stream(server, "/api/v1/agents/node-0/commands") as answer:
        lines = [decode_line(line) for line, _ in zip(answer.iter_lines(), range(3), strict=False)]
    assert all(isinstance(line, Ping) for line in lines)


def test_events_start_with_a_snapshot_and_continue_with_changes(server: Any) -> None:
    job_id = post_job(server.url)
    with stream(server, f"/api/v1/events?job={job_id}") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
        first = next(found)
        assert first[1:] == (
            "job",
            httpx.get(f"{server.url}/api/v1/jobs/{job_id}", timeout=60).json(),
        )
        assert next(found)[1:] == ("ranks", [])
        change(server, job_id)
        number, kind, job = next(found)
        assert (kind, job["id"]) == ("job", job_id)
        assert number > first[0]


def change(server: Any, job_id: str) -> None:
    with server.program.database.write() as session:
        record_change(session, job_id, "job", job_id)
    server.program.signals.changes.notify()


def test_reconnected_client_resumes_and_gets_each_resource_once(server: Any) -> None:
    job_id, other = post_job(server.url), post_job(server.url)
    with stream(server, f"/api/v1/events?job={job_id}") as answer:
        position = next(events(answer))[0]
    for each in (job_id, other, job_id, job_id):
        change(server, each)
    with stream(
        server, f"/api/v1/events?job={job_id}", **{"Last-Event-ID": str(position)}
    ) as answer:
        assert answer.headers["Paceline-Stream-Start"] == "resumed"
        found = events(answer)
        number, kind, job = next(found)
        assert (kind, job["id"]) == ("job", job_id)
        assert number == position + 4, "three changes, one event: the newest"
        change(server, job_id)
        assert next(found)[0] == position + 5


@pytest.mark.any_database
def test_client_that_cannot_resume_gets_a_snapshot(server: Any) -> None:
    job_id = post_job(server.url)
    for _ in range(5):
        change(server, job_id)
    with server.program.database.write() as session:
        prune_changes(session, 2)
    for known in ("999999", "0", "x"):
        with stream(server, f"/api/v1/events?job={job_id}", **{"Last-Event-ID": known}) as answer:
            assert answer.headers["Paceline-Stream-Start"] == "snapshot"
            found = events(answer)
            assert [next(found)[1] for _ in range(2)] == ["job", "ranks"]


def test_stream_ends_if_missed_changes_were_pruned(
    server: Any, wait_for: Callable[..., Any]
) -> None:
    """The client then reconnects and starts again with a snapshot."""
    job_id = post_job(server.url)
    with stream(server, f"/api/v1/events?job={job_id}") as answer:
        found = events(answer)  # a reference is kept; without it the client would disconnect
        next(found)
        with server.program.database.write() as session:
            for kind in ("job", "ranks", "job"):
                record_change(session, job_id, kind, job_id)
            prune_changes(session, 1)
        wait_for(lambda: server.program.signals.changes.subscribers == 0, "its end")


@pytest.mark.any_database
def test_streams_end_when_the_client_disconnects(server: Any, wait_for: Callable[..., Any]) -> None:
    signals = server.program.signals
    for _ in range(5):
        with stream(server, "/api/v1/agents/node-0/commands") as answer:
            next(answer.iter_lines())
        with stream(server, "/api/v1/events") as answer:
            next(answer.iter_lines())
    wait_for(
        lambda: signals.commands.subscribers == signals.changes.subscribers == 0, "the streams' end"
    )
    registry = server.program.metrics.registry
    wait_for(
        lambda: registry.get_sample_value("paceline_streams", {"kind": "commands"}) == 0,
        "the count",
    )


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("scope", "path"),
    [("agent", "/api/v1/agents/node-0/commands"), ("viewer", "/api/v1/events")],
)
def test_stream_ends_when_its_token_is_revoked(
    server: Any, scope: Scope, path: str, wait_for: Callable[..., Any]
) -> None:
    database, signals = server.program.database, server.program.signals
    with database.write() as session:
        token = create_token(session, "gone", scope, 1)
    with stream(server, path, Authorization=f"Bearer {token}") as answer:
        lines = answer.iter_lines()  # a reference is kept; without it the client would disconnect
        next(lines)
        with database.write() as session:
            assert revoke_token(session, "gone", 2)
        wait_for(
            lambda: signals.commands.subscribers == signals.changes.subscribers == 0, "its end"
        )


@pytest.mark.any_database
def test_server_stops_although_streams_are_open(server: Any) -> None:
    with (
        stream(server, "/api/v1/agents/node-0/commands") as commands,
        stream(server, "/api/v1/events") as changes,
    ):
        next(commands.iter_lines())
        next(changes.iter_lines())
        server.stop()  # fails if it hangs
