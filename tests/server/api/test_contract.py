"""The API conforms to its OpenAPI document, whatever a client sends.

Schemathesis derives valid and invalid requests from the document, sends them to a real server with
a real database, and compares each response with the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from simulated_node import post_job

from paceline_server.settings import Settings
from paceline_wire.batch import CONTENT_TYPE
from tests.server.conftest import RunningServer

DOCUMENT = Path(__file__).parents[3] / "web" / "openapi.json"
STREAMS = r"/(events|commands)$"  # streams do not end: see test_streams.py
# Some rules are not in the document: cursors come from earlier pages, and the world size is
# limited.
UNDOCUMENTED_RULES = [positive_data_acceptance]

api = schemathesis.openapi.from_path(str(DOCUMENT)).exclude(path_regex=STREAMS)


@schemathesis.serializer(CONTENT_TYPE)
def unchanged(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    database = tmp_path_factory.mktemp("contract") / "test.db"
    running = RunningServer(Settings(database_url=f"sqlite:///{database}", port=0, role="api"))
    running.start()
    post_job(running.url)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def session(server: RunningServer) -> Iterator[requests.Session]:
    with requests.Session() as opened:
        opened.headers["Authorization"] = server.client.headers["Authorization"]
        yield opened


@api.parametrize()
@settings(
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_responses_are_as_documented(
    case: schemathesis.Case, server: RunningServer, session: requests.Session
) -> None:
    case.call_and_validate(
        base_url=server.url, session=session, excluded_checks=UNDOCUMENTED_RULES, timeout=60.0
    )


def test_options_names_all_methods_of_an_address(server: RunningServer) -> None:
    for path, allowed in (
        ("/api/v1/jobs", "GET, POST, OPTIONS"),
        ("/api/v1/jobs/x/ranks/0/stacks", "GET, POST, OPTIONS"),
        ("/api/v1/ingest", "POST, OPTIONS"),
        ("/metrics", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
    ):
        answer = server.client.options(path)
        assert (answer.status_code, answer.headers["allow"]) == (204, allowed), path
        refused = server.client.delete(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed), path
    assert server.client.options("/api/v1/nothing").status_code == 404
