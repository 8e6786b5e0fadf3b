"""The observation of a job: its incidents as they were at their worst."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline_cli.client import Client
from paceline_evaluation.observed_job import ObservedJob


@contextmanager
def serving(*severities: str) -> Iterator[Client]:
    """Serve a job whose only incident has these severities, one per request."""
    left = list(severities)

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found: dict[str, Any] = {"step": 7, "state": "running"}
            if "/incidents" in self.path:
                found = {"items": [{"id": "inc-1", "severity": left.pop(0)}], "next_cursor": None}
            content = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            yield client
        server.shutdown()


def test_a_warning_that_became_information_is_still_counted_as_a_warning() -> None:
    with serving("info", "warning", "info") as client:
        job = ObservedJob(client, "job-1")
        seen = []
        for _ in range(3):
            job.poll()
            seen.append(job.incidents["inc-1"]["severity"])
    assert seen == ["info", "warning", "warning"]
