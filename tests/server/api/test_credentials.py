"""Every request that changes something needs a credential, also on loopback."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from paceline_server.api import router
from paceline_server.store.tokens import SESSION_NS, create_token, revoke_token
from paceline_wire.local_token import read_token, token_path

READ, STOP = "/api/v1/jobs", "/api/v1/jobs/nope/stop"
SIGNED_OUT = "Without a credential this server can only be read"


def changing_routes() -> list[tuple[str, str]]:
    """Return (method, path) of every route that may change something."""
    routes = iter_route_contexts(router.build(None).router.routes)
    return sorted(
        (method, re.sub(r"\{\w+\}", "x", route.path or ""))
        for route in routes
        for method in (route.methods or set()) - {"GET", "HEAD", "OPTIONS"}
    )


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    return run_server(role="api")


@pytest.fixture
def anyone(server: Any) -> Iterator[httpx.Client]:
    """Return a client on this machine without a credential."""
    with httpx.Client(base_url=server.url, timeout=60.0, verify=False) as client:
        yield client


@pytest.mark.any_database
def test_every_changing_route_needs_a_credential_that_may_change(
    server: Any, anyone: httpx.Client
) -> None:
    routes = changing_routes()
    assert {("POST", READ), ("POST", "/api/v1/ingest"), ("POST", "/api/v1/login-links")} <= {
        *routes
    }
    for method, path in routes:
        refused = anyone.request(method, path)
        assert refused.status_code == 401, path
        assert SIGNED_OUT in refused.json()["detail"]
    with server.program.database.write() as session:
        anyone.headers["Authorization"] = f"Bearer {create_token(session, 'eve', 'viewer', 1)}"
    for method, path in routes:
        assert anyone.request(method, path).status_code == 403, path


@pytest.mark.any_database
def test_commands_of_agents_may_carry_secrets_and_need_the_agents_token(
    anyone: httpx.Client,
) -> None:
    assert anyone.get("/api/v1/agents/node-0/commands").status_code == 401


def test_everyone_on_this_machine_may_read_until_a_token_is_created(
    server: Any, anyone: httpx.Client, wait_for: Callable[..., Any]
) -> None:
    assert anyone.get(READ).status_code == 200
    caller = anyone.get("/api/v1/caller").json()
    assert caller == {"name": "anyone on this machine", "can_change": False}
    with server.program.database.write() as session:
        create_token(session, "eve", "viewer", 1)
    wait_for(lambda: anyone.get(READ).status_code == 401, "the end")
    assert server.client.get(READ).status_code == 200, "the local token stays valid"


@pytest.mark.any_database
def test_local_tokens_are_files_of_their_user_alone(server: Any) -> None:
    directory = server.program.state_directory
    for scope in ("agent", "operator"):
        assert token_path(directory, scope).stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o077 == 0
    assert server.client.post(STOP).status_code == 404
    agent = {"Authorization": f"Bearer {read_token(token_path(directory, 'agent'))}"}
    assert server.client.post(STOP, headers=agent).status_code == 403


@pytest.mark.any_database
def test_local_tokens_stay_valid_with_a_new_database_and_end_when_revoked(
    server: Any, run_server: Callable[..., Any], wait_for: Callable[..., Any], tmp_path: Any
) -> None:
    other = run_server(role="api", database_url=f"sqlite:///{tmp_path}/other.db")
    assert server.client.headers["Authorization"] == other.client.headers["Authorization"]
    assert other.client.post(STOP).status_code == 404
    with other.program.database.write() as session:
        assert revoke_token(session, "local-operator", 2)
    again = run_server(role="api", database_url=f"sqlite:///{tmp_path}/other.db")
    assert again.client.post(STOP).status_code == 401, "a restart must not bring it back"


@pytest.mark.any_database
def test_server_with_only_configured_tokens_makes_none_of_its_own(
    server: Any, run_server: Callable[..., Any], tmp_path: Any
) -> None:
    with server.program.database.write() as session:
        session.connection().exec_driver_sql("DELETE FROM tokens")
        create_token(session, "me", "operator", 1)
    again = run_server(role="api", state_directory=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert again.client.get(READ).status_code == 401


class Browser:
    """A browser that opens a link and keeps the cookie and, like the page, the fragment."""

    def __init__(self, server: Any) -> None:
        self.client = httpx.Client(base_url=server.url, timeout=60.0, verify=False)
        self.answer = self.client.get(link(server))

    @property
    def sign(self) -> dict[str, str]:
        fragment = urlsplit(self.answer.headers["location"]).fragment
        return {"X-Paceline-Session": fragment.removeprefix("session=")}


@pytest.fixture
def browser(server: Any) -> Iterator[Browser]:
    opened = Browser(server)
    yield opened
    opened.client.close()


def link(server: Any) -> str:
    path: str = server.client.post("/api/v1/login-links").raise_for_status().json()["path"]
    return path


def test_a_login_link_signs_in_one_browser_once(server: Any, browser: Browser) -> None:
    cookie = browser.answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert browser.answer.headers["cache-control"] == "no-store"
    assert browser.client.post(STOP, headers=browser.sign).status_code == 404
    caller = browser.client.get("/api/v1/caller", headers=browser.sign).json()
    assert caller["can_change"]
    assert caller["name"].startswith("local-operator/browser-")
    used = browser.client.get(str(browser.answer.request.url))
    assert (used.status_code, "set-cookie" in used.headers) == (403, False)
    assert "`paceline login` prints a new one" in used.text


@pytest.mark.any_database
def test_a_cookie_without_the_half_that_only_the_page_has_changes_nothing(
    server: Any, browser: Browser
) -> None:
    """Browsers send cookies to all ports of a host, and with requests from other pages."""
    assert browser.client.post(STOP).status_code == 401
    with httpx.Client(base_url=server.url, verify=False, timeout=60) as other:
        assert other.post(STOP, headers=browser.sign).status_code == 401
    wrong = {"X-Paceline-Session": "x"}
    assert browser.client.post(STOP, headers=wrong).status_code == 401
    assert browser.client.get(READ, headers=wrong).status_code == 200, "as everyone may"


def test_sessions_and_links_expire(server: Any, browser: Browser) -> None:
    unused = link(server)
    parts = server.app.state.parts
    later = parts.now_ns() + SESSION_NS
    server.app.state.parts = dataclasses.replace(parts, now_ns=lambda: later)
    assert browser.client.post(STOP, headers=browser.sign).status_code == 401
    assert browser.client.get(unused).status_code == 403


@pytest.mark.any_database
def test_sessions_end_with_the_token_they_came_from(
    server: Any, browser: Browser, wait_for: Callable[..., Any]
) -> None:
    unused = link(server)
    with server.program.database.write() as session:
        assert revoke_token(session, "local-operator", 2)
    wait_for(
        lambda: browser.client.post(STOP, headers=browser.sign).status_code == 401, "the session"
    )
    assert browser.client.get(unused).status_code == 403
