"""The batches of each node and when to send them, prepared before the run and stored on disk.

A separate process prepares them (`made`), because that takes CPU time; the run only sends bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.fleet.load import Load
from benchmarks.fleet.nodes import Node, Rank
from benchmarks.fleet.steps import PlayedJob, Words
from paceline_wire.batch import SpanBlock

_ROW = np.dtype([("node", "i4"), ("step", "i4"), ("due", "f8"), ("offset", "i8"), ("length", "i8")])
_NO_STEP = -1
_FIRST_PLANNED = 1 << 20  # lower sequence numbers are heartbeats
_START_DELAY_SECONDS = 5.0  # from the end of planning to the first batch


class Planned(NamedTuple):
    due: float  # time.time()
    request: bytes
    step: int | None  # the step of its spans

    @property
    def payload(self) -> bytes:
        return self.request.partition(b"\r\n\r\n")[2]


class Plan:
    """The plan in `directory`."""

    def __init__(self, directory: Path) -> None:
        rows = np.load(directory / "rows.npy")
        self._requests = np.memmap(directory / "requests", mode="r")
        self.begins = float(rows["due"].min())
        self.spans = int(np.load(directory / "spans.npy"))
        order = np.argsort(rows["node"], kind="stable")
        self._rows = rows[order]
        self._first = np.searchsorted(self._rows["node"], np.arange(rows["node"].max() + 2))

    def of(self, node: int) -> Iterator[Planned]:
        """Return the node's batches in the order of their due times."""
        return self._planned(self._rows[self._first[node] : self._first[node + 1]])

    def all(self) -> Iterator[Planned]:
        """Return the batches of all nodes in the order of their due times."""
        return self._planned(self._rows[np.argsort(self._rows["due"], kind="stable")])

    def _planned(self, rows: npt.NDArray[np.void]) -> Iterator[Planned]:
        for row in rows:
            end = row["offset"] + row["length"]
            request = self._requests[row["offset"] : end].tobytes()
            step = None if row["step"] == _NO_STEP else int(row["step"])
            yield Planned(float(row["due"]), request, step)


def made(
    load: Load, job_id: str, generation: int, directory: Path, start: float | None = None
) -> Plan:
    """Prepare a plan in a separate process and wait for it. `start`: time 0 of the job."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(_write, load, job_id, generation, directory, start).result()
    return Plan(directory)


def _write(load: Load, job_id: str, generation: int, directory: Path, start: float | None) -> None:
    if start is not None:
        _Planner(load, job_id, generation, directory, start).write(load.steps)
        return
    began = time.perf_counter()
    _Planner(load, job_id, generation, directory, 0.0).write(1)
    seconds = (time.perf_counter() - began) * (load.steps + 1)
    begins = 0.0
    while begins < time.time() + _START_DELAY_SECONDS:
        begins = time.time() + seconds + 2 * _START_DELAY_SECONDS
        _Planner(load, job_id, generation, directory, begins).write(load.steps)
        seconds *= 2


class _Planner:
    """Converts computed steps to the batches of each node."""

    def __init__(
        self, load: Load, job_id: str, generation: int, directory: Path, start: float
    ) -> None:
        self._load = load
        self._directory = directory
        self._start = start  # time.time() of the job's time 0
        self._job = PlayedJob(
            load.topology, load.microbatches, int(load.step_seconds * 1e9), seed=1
        )
        self._nodes = [Node(number) for number in range(load.nodes)]
        self._ranks = [
            Rank(job_id, generation, number, load.topology, int(start * 1e9))
            for number in range(load.topology.world_size)
        ]
        self._phase: list[float] = np.random.default_rng(1).random(load.nodes).tolist()
        self._due = [start + phase * 0.5 for phase in self._phase]
        self._sequence = [_FIRST_PLANNED] * load.nodes
        self._rows: list[tuple[int, int, float, int, int]] = []
        self._spans = 0

    def write(self, steps: int) -> None:
        with (self._directory / "requests").open("wb") as file:
            for node in self._nodes:
                events = [one for number in node.ranks for one in self._ranks[number].beginning()]
                self._put(file, node, self._due[node.number], events=events)
            for step in range(steps):
                words = self._job.play(self._load.slow_ranks(step))
                self._spans += sum(stage[0].size for stage in words)
                for node in self._nodes:
                    self._step(file, node, step, words)
        np.save(self._directory / "rows.npy", np.array(self._rows, dtype=_ROW))
        np.save(self._directory / "spans.npy", self._spans)

    def _step(self, file: BinaryIO, node: Node, step: int, words: list[Words]) -> None:
        """Add a node's batches until the end of this step; the last one has its spans."""
        known = self._due[node.number]
        ended = self._start + self._job.now_ns / 1e9
        due = ended + self._phase[node.number] * self._load.batch_seconds
        beats = max(round((due - known) / self._load.batch_seconds), 1)
        ranks = [self._ranks[number] for number in node.ranks]
        for beat in range(1, beats):
            self._look(file, node, known + beat * (due - known) / beats, step, [])
        self._look(file, node, due, step, [rank.block(words) for rank in ranks])
        self._due[node.number] = due

    def _look(
        self, file: BinaryIO, node: Node, due: float, step: int, blocks: list[SpanBlock]
    ) -> None:
        now_ns = self._job.now_ns
        done = step + 1 if blocks else step
        self._put(
            file,
            node,
            due,
            step if blocks else _NO_STEP,
            events=[self._ranks[number].state(due, done, now_ns) for number in node.ranks],
            spans=blocks,
            blocks=node.samples(due),
        )

    def _put(
        self,
        file: BinaryIO,
        node: Node,
        due: float,
        step: int = _NO_STEP,
        **content: object,
    ) -> None:
        request = node.batch(self._sequence[node.number], due, **content)
        self._sequence[node.number] += 1
        self._rows.append((node.number, step, due, file.tell(), len(request)))
        file.write(request)
