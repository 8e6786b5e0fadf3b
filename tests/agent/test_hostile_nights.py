"""A real agent through what a night may bring: each is one clear sentence, and work goes on."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from paceline_wire.batch import RankAttached

Fixture = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Metrics:
    """What an agent that was started with `options` says of itself."""

    def __init__(self) -> None:
        self._port = free_port()
        self.options = ("--metrics", "--metrics-port", str(self._port))

    def __getitem__(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            text = answer.read().decode()
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"paceline_agent_{name}"
        ]
        (value,) = found
        return value


def test_a_full_disk_costs_the_oldest_detail_which_is_counted_and_heals(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    small_disk: Callable[[str], Path],
    make_rank: Fixture,
    spans_of: Fixture,
) -> None:
    disk, metrics = small_disk("1m"), Metrics()
    agent = start_agent(
        "--spool-directory", str(disk / "spool"), "--spool-bytes", "300000", *metrics.options
    )
    wait_for(lambda: server.batches)
    server.stop()
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
    rank = make_rank(agent.directory)

    def has_lost() -> bool:
        rank.write(8000)
        return metrics["spool_lost_spans_total"] > 0

    wait_for(has_lost, seconds=60)
    assert metrics["spool_writable"] == 0
    assert metrics["spool_bytes"] <= 300_000
    (disk / "filler").unlink()
    wait_for(lambda: rank.write(1) or metrics["spool_writable"] == 1)
    server.start()
    wait_for(lambda: metrics["spool_batches"] <= 1 and rank.written - 1 in spans_of(server))
    dropped = metrics["spool_lost_spans_total"]
    agent.stop()
    found = spans_of(server)
    overrun = sum(block.lost for batch in server.batches for block in batch.spans)
    assert found == sorted(set(found))
    assert found[-1] == rank.written - 1, "the newest stay"
    assert len(found) + overrun + dropped == rank.written, "what is lost is counted"
    assert server.batches[-1].dropped_batches > 0, "and shown"
    assert len(server.events(RankAttached)) == 1, "facts stay"
    assert agent.log_text().count("cannot be written (No space left on device)") == 1
    assert agent.log_text().count("can be written again") == 1
    assert "Traceback" not in agent.log_text()
