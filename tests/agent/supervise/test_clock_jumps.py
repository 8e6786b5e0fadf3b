"""A node's clock is set, the node is suspended, its agent restarts with the clock set back.

The test has a real agent, and fakes the machine's clocks below its interpreter.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline_wire.batch import Batch, decode
from paceline_wire.spans import from_columns, unpack
from tests.ports import free_port

Fixture = Callable[..., Any]
SOURCE = Path(__file__).parents[1] / "fixtures" / "set_clocks.c"
HOUR = 3600
SUSPENDED = 600


class Clocks:
    """The faked clocks of all processes with this environment."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("CLOCK JUMPS ARE NOT TESTED: no C compiler (cc) to fake the clocks with")
        library = directory / "set_clocks.so"
        command = [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE]
        subprocess.run(command, check=True)
        self._file = directory / "clocks"
        self._file.write_bytes(bytes(16))
        self.realtime_seconds = 0  # offset by which CLOCK_REALTIME was set
        self.environment = {"LD_PRELOAD": str(library), "SET_CLOCKS": str(self._file)}

    def set(self, realtime_seconds: int, suspended_seconds: int = 0) -> None:
        """Set the clocks. CLOCK_MONOTONIC stops during a suspension, the others continue."""
        self.realtime_seconds = realtime_seconds
        realtime_ns = (realtime_seconds + suspended_seconds) * 10**9
        with self._file.open("r+b") as file:
            file.write(struct.pack("qq", realtime_ns, suspended_seconds * 10**9))


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path)


def check_order(batches: Sequence[Batch]) -> None:
    """Check each boot: no batch is repeated.

    Each series and the spans are unique and in time order.
    """
    boots: dict[str, list[Batch]] = defaultdict(list)
    for batch in batches:
        boots[batch.boot_id].append(batch)
    assert list(boots) == sorted(boots), "boots sort in the order in which they began"
    for of_boot in boots.values():
        assert [batch.sequence for batch in of_boot] == list(range(len(of_boot)))
        packed = [batch.packed_ns for batch in of_boot]
        assert packed == sorted(packed)
        series: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for batch in of_boot:
            for sample in batch.samples:
                labels = (f"{name}={value}" for name, value in sample.labels.items())
                series[sample.name, *sorted(labels)].append(sample.time_ns)
        assert series
        for name, times in series.items():
            assert all(before < after for before, after in pairwise(times)), name
        starts = [
            span.start_ns + block.clock_offset_ns
            for batch in of_boot
            for block in batch.spans
            for span in unpack(from_columns(block.columns))
        ]
        assert starts == sorted(starts)
        for event in (event for batch in of_boot for event in batch.events):
            assert 0 <= event.time_ns <= packed[-1], event


def newest(batches: Sequence[Batch], name: str) -> float | None:
    values = [sample.value for batch in batches for sample in batch.samples if sample.name == name]
    return values[-1] if values else None


def jump(clocks: Clocks, wait_for_data: Callable[[], object]) -> None:
    """Set the clock an hour forward, two back, suspend, and back to now.

    `wait_for_data` is called after each change.
    """
    for realtime_seconds, suspended_seconds in (
        (HOUR, 0),
        (-HOUR, 0),
        (-HOUR, SUSPENDED),
        (0, SUSPENDED),
    ):
        wait_for_data()
        clocks.set(realtime_seconds, suspended_seconds)
    wait_for_data()


def test_no_sample_is_out_of_order_or_twice_when_the_clock_is_set(
    start_agent: Fixture,
    server: Any,
    wait_for: Fixture,
    clocks: Clocks,
    make_rank: Fixture,
    spans_of: Fixture,
) -> None:
    first = start_agent(environment=clocks.environment)
    wait_for(lambda: server.batches)
    rank = make_rank(first.directory)

    def wait_for_data() -> None:
        before = len(server.batches)
        rank.write(20)
        wait_for(lambda: len(server.batches) >= before + 4)

    jump(clocks, wait_for_data)
    first.stop(signal.SIGKILL)
    clocks.set(-2 * HOUR)
    start_agent(environment=clocks.environment)
    wait_for_data()
    wait_for(lambda: len(spans_of(server)) == rank.written)
    assert spans_of(server) == list(range(rank.written))
    assert len({batch.boot_id for batch in server.batches}) == 2
    check_order(server.batches)
    packed = [batch.packed_ns for batch in server.batches]
    assert max(packed) - time.time_ns() > (SUSPENDED - 60) * 10**9, "it was suspended"
    assert time.time_ns() - packed[-1] > HOUR * 10**9, "the second begins where its clock is"


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Start a real server. Return its URL and its database."""
    port = free_port()
    database = tmp_path / "server.db"
    command = [sys.executable, "-m", "paceline_cli", "server", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--database-url", f"sqlite:///{database}"], stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}", database
    process.terminate()
    process.wait(60)


@pytest.mark.campaign
def test_a_real_server_stores_every_sample_once_and_in_order_and_the_offset(
    real_server: tuple[str, Path],
    start_agent: Fixture,
    wait_for: Fixture,
    clocks: Clocks,
    make_rank: Fixture,
) -> None:
    url, database = real_server

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"{url}/healthz").close()
        except OSError:
            return False
        return True

    def stored() -> list[Batch]:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            rows = connection.execute("SELECT payload FROM hot_log ORDER BY id").fetchall()
        return [decode(payload) for (payload,) in rows]

    wait_for(answers, seconds=60)
    first = start_agent(url=url, environment=clocks.environment)
    wait_for(stored)
    rank = make_rank(first.directory)

    def wait_for_data() -> None:
        """Wait until the server has the offset by which the clock was set."""
        before = len(stored())
        rank.write(20)
        stepped = "paceline_agent_clock_stepped_seconds"
        expected = clocks.realtime_seconds
        wait_for(lambda: len(stored()) > before + 2 and newest(stored(), stepped) is not None)
        wait_for(lambda: abs((newest(stored(), stepped) or 0) - expected) < 1.0, seconds=60)

    jump(clocks, wait_for_data)
    offset = newest(stored(), "paceline_agent_clock_server_offset_seconds")
    assert offset is not None
    assert offset == pytest.approx(-SUSPENDED, abs=5.0), "the server was not suspended"
    first.stop(signal.SIGKILL)
    clocks.set(-2 * HOUR)
    start_agent(url=url, environment=clocks.environment)
    wait_for(lambda: len({batch.boot_id for batch in stored()}) == 2)
    offset_name = "paceline_agent_clock_server_offset_seconds"
    wait_for(lambda: (newest(stored(), offset_name) or 0) > 0, seconds=60)
    assert newest(stored(), offset_name) == pytest.approx(2 * HOUR, abs=5.0)
    check_order(stored())
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (boot_id,) = connection.execute("SELECT boot_id FROM nodes").fetchone()
    assert boot_id == stored()[-1].boot_id, "the newest boot is the node, whatever its clock says"
