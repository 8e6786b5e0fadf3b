"""An hour without a server: the size of the spool, and how quickly it is sent afterwards.

The batches of the hour are made as the agent makes them: one sweep per second of a node of 8 GPUs
and 9 HCAs, and a few hundred spans of 8 ranks. Then a real agent sends them to a real server.
Meanwhile an emulated GPU gets new temperatures. The time until the API returns one, including the
wait for the next sweep, is the delay of live data.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from benchmarks.agent_latency import GOAL_SECONDS, await_shown
from benchmarks.harness import Result
from benchmarks.node import FakeNode, free_port
from paceline_agent.forward.spool import Spool
from paceline_wire.batch import Batch, Sample, SpanBlock
from paceline_wire.spans import NONE_16, NONE_32, RECORD, Op, to_columns

SECONDS = 3600
SERIES = 850
SPANS = 40  # per rank and second, for 8 ranks
GOAL_MIB, GOAL_SPEED = 64.0, 20.0
LONGEST_SECONDS = 180


def measure() -> Iterator[Result]:
    with FakeNode() as node:
        directory = node.directory / "node" / "spool"
        spool = Spool(directory, 64 << 20)
        boot_id = fill(spool)
        waiting, mebibytes = len(spool), spool.size_bytes / (1 << 20)
        yield Result("outage: an hour in the spool", mebibytes, "MiB", None, GOAL_MIB)
        yield Result("outage: batches that lost something", spool.counts.dropped, "", None, 0)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "paceline_cli", "server", "--port", str(port)]
        command += ["--database-url", f"sqlite:///{node.directory / 'server.db'}"]
        with node.running("server", command):
            _await_answer(url)
            with node.agent(url) as agent:
                started, before_ms = time.monotonic(), agent.cpu_ms
                delays = _Delays(node, url)
                while left := len(list(directory.glob(f"{boot_id}.*"))):
                    if time.monotonic() - started > LONGEST_SECONDS:
                        raise RuntimeError(f"{left} of {waiting} batches still wait")
                    time.sleep(0.05)
                seconds = time.monotonic() - started
                cpu_seconds = (agent.cpu_ms - before_ms) / 1000
                live = delays.stop()
    speed = SECONDS / seconds
    yield Result("outage: drained", speed, "x real time", None, GOAL_SPEED, more_is_better=True)
    yield Result("outage: live values meanwhile", len(live), "")
    yield Result("outage: longest delay of a live value", max(live), "s", None, GOAL_SECONDS)
    yield Result("outage: cost of sending the hour", cpu_seconds, "CPU s")


def _await_answer(url: str) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/healthz").close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


class _Delays:
    """Changes a GPU's temperature repeatedly, after the agent has reported for the first time."""

    def __init__(self, node: FakeNode, url: str) -> None:
        self._node, self._url = node, url
        self._seconds: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> list[float]:
        self._ended.set()
        self._thread.join()
        return self._seconds

    def _watch(self) -> None:
        chance = random.Random(1)
        await_shown(self._url, None)
        while not self._ended.is_set():
            celsius = 40 + len(self._seconds) % 40
            self._node.gpus.set(0, temperature_celsius=celsius)
            started = time.monotonic()
            await_shown(self._url, celsius)
            self._seconds.append(time.monotonic() - started)
            self._ended.wait(chance.random())


def fill(spool: Spool) -> str:
    """Fill the spool with an hour of batches. Return their boot id."""
    chance = random.Random(1)
    labels = [{"gpu": str(number % 8), "UUID": f"GPU-{number % 8}"} for number in range(SERIES)]
    names = [f"DCGM_FI_DEV_{number // 8}" for number in range(SERIES)]
    now_ns = time.time_ns() - SECONDS * 10**9
    boot_id = spool.begin_boot()
    for second in range(SECONDS):
        time_ns = now_ns + second * 10**9
        samples = [
            Sample(name, label, float(chance.randrange(100)) if n % 4 == 0 else 1.0, time_ns)
            for n, (name, label) in enumerate(zip(names, labels, strict=True))
        ]
        batch = Batch(
            agent_id="bench",
            boot_id=boot_id,
            sequence=second,
            packed_ns=time_ns,
            samples=samples,
            spans=[_spans(rank, second, chance) for rank in range(8)],
        )
        spool.append(batch)
    return boot_id


def _spans(rank: int, second: int, chance: random.Random) -> SpanBlock:
    records = b"".join(
        RECORD.pack(
            second * SPANS + n, Op.FORWARD, n & 7, NONE_16, 0, second, NONE_32, NONE_32, 0, 0, 0,
            second * 10**9 + n * 10**7, 10**7 + chance.randrange(10**6),
        )
        for n in range(SPANS)
    )  # fmt: skip
    columns = to_columns(records)
    return SpanBlock(job="bench", generation=0, rank=rank, columns=columns, clock_offset_ns=0)
