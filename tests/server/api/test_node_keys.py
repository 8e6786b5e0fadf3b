"""Batches and command streams of a node belong to the holder of the node's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from simulated_node import bearer

from paceline_server.__main__ import main
from paceline_server.api.node_keys import NodeKeyVerifier
from paceline_server.store.models import AuditRow, NodeKeyRow, NodeRow
from paceline_wire import batch as wire
from paceline_wire.batch import Batch
from paceline_wire.node_key import HEADER

OWN, FORGED = "o" * 43, "f" * 43
pytestmark = pytest.mark.any_database


class Site:
    """A server that caches key lookups with a clock that the test controls."""

    def __init__(self, server: Any, database_url: str) -> None:
        self.server = server
        self._database_url = database_url
        self.seconds = 0.0
        server.app.state.node_key_verifier = NodeKeyVerifier(lambda: self.seconds)
        self._agent = bearer(server.url, "agent")
        self._sequence = 0

    def send(self, key: str | None, agent_id: str = "node-0") -> httpx.Response:
        self._sequence += 1
        batch = Batch(agent_id=agent_id, boot_id="b", sequence=self._sequence, packed_ns=1)
        response: httpx.Response = self.server.client.post(
            "/api/v1/ingest",
            content=wire.encode(batch),
            headers={**self._headers(key), "Content-Type": wire.CONTENT_TYPE},
        )
        return response

    def stream(self, key: str | None, agent_id: str = "node-0") -> Any:
        path = f"{self.server.url}/api/v1/agents/{agent_id}/commands"
        return httpx.stream("GET", path, headers=self._headers(key), timeout=60.0)

    def use_token(self, *options: str) -> None:
        """Send with a token that `paceline server token create` made."""
        made = self.command("token", "create", "--name=join", "--scope=agent", *options)
        self._agent = {"Authorization": f"Bearer {made.output.strip()}"}

    def release(self, agent_id: str) -> Any:
        return self.command("node-key", "release", agent_id)

    def command(self, *arguments: str) -> Any:
        return CliRunner().invoke(
            main, ["server", "--database-url", self._database_url, *arguments]
        )

    def _headers(self, key: str | None) -> dict[str, str]:
        return self._agent | ({} if key is None else {HEADER: key})


@pytest.fixture
def site(run_server: Callable[..., Any], database_url: str) -> Site:
    return Site(run_server(role="api"), database_url)


def test_only_the_node_itself_sends_batches_in_its_name(site: Site) -> None:
    assert site.send(OWN).status_code == 200
    for key in (FORGED, None, "", "o" * 42):
        refused = site.send(key)
        assert refused.status_code == 403, key
        assert "paceline server node-key release node-0" in refused.json()["detail"]
        assert refused.headers["content-type"] == "application/problem+json"
    assert site.send(OWN).status_code == 200
    assert site.send(FORGED, "node-1").status_code == 200, "the first key of another id"


def test_only_the_node_itself_receives_its_commands(site: Site) -> None:
    assert site.send(OWN).status_code == 200
    for key in (FORGED, None):
        with site.stream(key) as refused:
            assert refused.status_code == 403
    with site.stream(OWN) as stream:
        assert stream.status_code == 200
        next(stream.iter_lines())


def test_a_node_that_first_opens_its_stream_is_bound_then(site: Site) -> None:
    with site.stream(OWN) as stream:
        assert stream.status_code == 200
    assert site.send(FORGED).status_code == 403


def test_a_stream_opened_before_the_node_showed_its_key_ends(site: Site) -> None:
    with site.stream(None) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        next(lines)
        assert site.send(OWN).status_code == 200
        site.seconds += 10.0
        for _ in lines:
            pass  # the stream ends, or the client times out


def test_an_agent_without_a_key_is_accepted_while_its_id_has_none(site: Site) -> None:
    assert site.send(None).status_code == 200
    assert site.send(OWN).status_code == 200
    site.seconds += 10.0
    assert site.send(None).status_code == 403


def test_a_released_id_is_bound_again_by_the_next_key(site: Site) -> None:
    assert site.send(OWN).status_code == 200
    assert site.send(FORGED).status_code == 403
    released = site.release("node-0")
    assert released.exit_code == 0, released.output
    assert site.send(FORGED).status_code == 403, "answers are used for a second"
    site.seconds += 2.0
    assert site.send(FORGED).status_code == 200
    site.seconds += 100.0
    assert site.send(OWN).status_code == 403
    with site.server.program.database.read() as session:
        (entry,) = session.query(AuditRow).filter_by(verb="released the key")
        assert (entry.actor, entry.subject) == ("command line", "node-0")


def test_release_of_an_unknown_id_is_an_error(site: Site) -> None:
    unknown = site.release("node-7")
    assert unknown.exit_code == 2
    assert "no key is known of an agent 'node-7'" in unknown.output


def test_the_database_holds_no_key(site: Site) -> None:
    assert site.send(OWN).status_code == 200
    with site.server.program.database.read() as session:
        (row,) = session.query(NodeKeyRow)
    assert OWN not in row.hash


def test_two_servers_bind_one_id_once(
    site: Site, run_server: Callable[..., Any], database_url: str
) -> None:
    other = Site(run_server(role="api"), database_url)
    assert site.send(OWN).status_code == 200
    assert other.send(FORGED).status_code == 403
    assert other.send(OWN).status_code == 200


def test_a_stolen_token_enrolls_no_further_node(site: Site) -> None:
    """Else a node that does not exist would be given ranks, and with them environments of jobs."""
    site.use_token()
    assert site.send(OWN).status_code == 200
    for key in (FORGED, OWN, None):
        refused = site.send(key, "node-1")
        assert refused.status_code == 403, key
        assert "may not enroll the node 'node-1'" in refused.json()["detail"]
        with site.stream(key, "node-1") as stream:
            assert stream.status_code == 403
    assert site.send(OWN).status_code == 200
    with site.server.program.database.read() as session:
        assert [row.agent_id for row in session.query(NodeRow)] == ["node-0"]


def test_a_limited_token_enrolls_no_node_without_a_key(site: Site) -> None:
    site.use_token("--nodes=2")
    assert site.send(None).status_code == 403
    assert site.send(OWN).status_code == 200
    assert site.send(FORGED, "node-1").status_code == 200
    assert site.send("g" * 43, "node-2").status_code == 403


def test_a_released_name_can_be_enrolled_with_the_same_token(site: Site) -> None:
    site.use_token()
    assert site.send(OWN).status_code == 200
    assert site.release("node-0").exit_code == 0
    site.seconds += 100.0
    assert site.send(FORGED, "node-1").status_code == 200
    assert site.send(OWN).status_code == 403


def test_a_token_for_any_number_of_nodes(site: Site) -> None:
    site.use_token("--nodes=0")
    assert {site.send(OWN, f"node-{number}").status_code for number in range(5)} == {200}
