"""A hostile web page in the browser of a signed-in user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from paceline_server.store.tokens import create_token

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
STOP = "/api/v1/jobs/nope/stop"


@pytest.fixture
def server(run_server: Callable[..., Any]) -> Any:
    return run_server(role="api", allowed_hosts=("paceline.example",))


@pytest.fixture
def client(server: Any) -> Any:
    return server.client


@pytest.mark.parametrize(
    "path",
    ["/", "/jobs/x", "/healthz", "/metrics", "/openapi.json", "/api/v1/jobs", "/api/nothing"],
)
def test_every_response_has_the_security_headers(client: httpx.Client, path: str) -> None:
    assert_secure(client.get(path))


def test_refusals_and_failures_have_the_security_headers(client: httpx.Client, server: Any) -> None:
    for answer in (
        client.post("/api/v1/ingest"),
        client.delete("/api/v1/jobs"),
        client.get("/", headers={"Host": "evil.example"}),
    ):
        assert answer.status_code >= 400
        assert_secure(answer)

    def fail() -> list[str]:
        raise RuntimeError("a bug")

    server.app.state.parts = dataclasses.replace(server.app.state.parts, unready=fail)
    broken = client.get("/readyz")
    assert broken.status_code == 500
    assert_secure(broken)


def assert_secure(answer: httpx.Response) -> None:
    policy = answer.headers["content-security-policy"]
    assert {"default-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_a_rebound_name_reads_nothing(client: httpx.Client) -> None:
    for host in ("evil.example", "evil.example:8470", "localhost.evil.example", "[", "x" * 300):
        refused = client.get("/api/v1/jobs", headers={"Host": host})
        assert refused.status_code == 421
        assert "--allowed-host" in refused.json()["detail"]
    port = client.base_url.port
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", "10.1.2.3", "Paceline.example"):
        assert client.get("/api/v1/jobs", headers={"Host": host}).status_code == 200


def test_a_server_beyond_loopback_goes_by_its_own_and_external_name(
    run_server: Callable[..., Any],
) -> None:
    server = run_server(role="api", host="0.0.0.0", external_url="https://pace.example/x")
    for host, status in (("pace.example", 200), ("evil.example", 421)):
        assert server.client.get("/healthz", headers={"Host": host}).status_code == status
    anything = run_server(role="api", allowed_hosts=("*",))
    assert anything.client.get("/healthz", headers={"Host": "any.example"}).status_code == 200


def test_other_pages_may_not_change_anything(client: httpx.Client) -> None:
    own = f"http://127.0.0.1:{client.base_url.port}"
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert client.post(STOP, headers=headers).status_code == 403, headers
    for headers in ({"Origin": own}, {"Sec-Fetch-Site": "same-origin"}):
        assert client.post(STOP, headers=headers).status_code == 404, headers


def test_metrics_beyond_loopback_need_a_token(run_server: Callable[..., Any]) -> None:
    server = run_server(role="api", host="0.0.0.0")
    with server.program.database.write() as session:
        viewer = create_token(session, "eve", "viewer", 1)
    with httpx.Client(base_url=server.url, verify=False, timeout=60) as anyone:
        assert anyone.get("/metrics").status_code == 401
        sign = {"Authorization": f"Bearer {viewer}"}
        assert "paceline_jobs" in anyone.get("/metrics", headers=sign).text
    public = run_server(role="api", host="0.0.0.0", public_metrics=True)
    assert httpx.get(f"{public.url}/metrics", timeout=60).status_code == 200
