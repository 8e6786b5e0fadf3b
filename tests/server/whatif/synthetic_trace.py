"""Synthetic traces: a pipeline that is executed event by event, with injected slowdowns.

The generator uses schedules and a network model, which the analysis does not have. So the tests can
compare the result of the analysis with the injected slowdowns. There are no launch delays, so a
replay of the recorded durations takes exactly as long as the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]  # [step, dp rank]

TRANSFER_SECONDS = 0.0004
COLLECTIVE_SECONDS = 0.01
FORWARD_SECONDS = 0.05


@dataclass
class SyntheticRun:
    """A pipeline run.

    `pace(stage, microbatch)` scales compute times: a number or an array of [step, dp rank].
    """

    dp: int = 2
    pp: int = 2
    tp: int = 1
    microbatches: int = 4
    chunks: int = 1
    steps: int = 3
    overlap: bool = False
    gpipe: bool = False
    split: bool = False  # zero-bubble: weight gradients are delayed, longer on later stages
    data_parallel: bool = True
    jitter: float = 0.0
    transfer_jitter: float = 0.0
    seed: int = 1
    pace: Callable[[int, int], float | Times] = lambda stage, microbatch: 1.0
    rows: list[tuple[str, int, int, int, int, int, Times, Times]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.sequences: dict[tuple[str, int], int] = {}
        # By (direction, global chunk, microbatch) of sends that were not received yet: the row of
        # the send.
        self.sent: dict[tuple[str, int, int], int] = {}
        self.stream: dict[tuple[str, int], Times] = {}
        self.gathered: dict[tuple[int, int], Times] = {}
        self.clock = [self._zeros() for _ in range(self.pp)]
        self.computed: dict[tuple[str, int], list[Times]] = {}
        self.done: list[list[tuple[str, Times]]] = [[] for _ in range(self.pp)]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of the trace layout, with `optype` as text."""
        self._run()
        shape = (self.steps, self.dp)
        step, dp = np.indices(shape)
        parts: dict[str, list[npt.NDArray[Any]]] = {}
        for optype, stage, sequence, chunk, at, microbatch, start, end in self.rows:
            for name, value in (
                ("dp_rank", dp),
                ("stage", np.full(shape, stage)),
                ("rank", (stage * self.dp + dp) * self.tp),
                ("step", step * 10 + 7),
                ("optype", np.full(shape, optype, dtype=object)),
                ("start_ts", start + 100.0 * step),
                ("duration", end - start),
                ("seq_id", np.full(shape, sequence)),
                ("mc", np.full(shape, chunk)),
                ("mb_id", np.full(shape, microbatch)),
                ("gmc", np.full(shape, at)),
            ):
                parts.setdefault(name, []).append(value.ravel())
        return {name: np.concatenate(values) for name, values in parts.items()}

    def metadata(self) -> str:
        return (
            f"trial_name: synthetic\nrun_id: 0\ndp_size: {self.dp}\npp_size: {self.pp}\n"
            f"tp_size: {self.tp}\ndsp_size: 1\nvpp_size: {self.chunks}\n"
            f"world_size: {self.dp * self.pp * self.tp}\n"
        )

    def _run(self) -> None:
        if self.data_parallel:
            for stage in range(self.pp):
                for chunk in range(self.chunks):
                    self.gathered[stage, chunk] = self._collective(
                        "params-all-gather", stage, self._stream("dp", stage), chunk=chunk
                    )
        orders = [self._order(stage) for stage in range(self.pp)]
        positions = [0] * self.pp
        while any(positions[stage] < len(orders[stage]) for stage in range(self.pp)):
            before = list(positions)
            for stage in range(self.pp):
                while positions[stage] < len(orders[stage]) and self._compute(
                    stage, orders[stage], positions[stage]
                ):
                    positions[stage] += 1
            assert positions != before, "the schedule is stuck"
        self._finish(orders)

    def _order(self, stage: int) -> list[tuple[str, int, int]]:
        """Return (direction, chunk, microbatch) in the order of GPipe, 1F1B or interleaved 1F1B."""
        total = self.microbatches * self.chunks
        width = self.pp * self.chunks

        def unit(number: int, direction: str) -> tuple[str, int, int]:
            chunk = number % width // self.pp
            microbatch = number // width * self.pp + number % self.pp
            return (
                direction,
                chunk if direction == "forward" else self.chunks - 1 - chunk,
                microbatch if self.chunks > 1 else number,
            )

        if self.chunks == 1:
            warm_up = self.pp - stage - 1
        else:
            warm_up = (self.pp - stage - 1) * 2 + (self.chunks - 1) * self.pp
        warm_up = total if self.gpipe else min(warm_up, total)
        order = [unit(number, "forward") for number in range(warm_up)]
        for number in range(total - warm_up):
            order += [unit(warm_up + number, "forward"), unit(number, "backward")]
        order += [unit(number, "backward") for number in range(total - warm_up, total)]
        if self.chunks == 1:
            order = [(direction, 0, microbatch) for direction, _, microbatch in order]
        return self._split_backwards(order, stage) if self.split else order

    def _split_backwards(
        self, order: list[tuple[str, int, int]], most_delayed: int
    ) -> list[tuple[str, int, int]]:
        result, delayed = [], []
        for unit in order:
            result.append(unit)
            if unit[0] == "backward":
                delayed.append(("backward-weight", *unit[1:]))
            if len(delayed) > most_delayed:
                result.append(delayed.pop(0))
        return result + delayed

    def _compute(self, stage: int, order: list[tuple[str, int, int]], position: int) -> bool:
        direction, chunk, microbatch = order[position]
        at = chunk * self.pp + stage
        forward = direction == "forward"
        source = at - 1 if forward else at + 1
        if direction == "backward-weight":
            arrived = self._zeros()
        elif 0 <= source < self.pp * self.chunks:
            if (direction, source, microbatch) not in self.sent:
                return False
            arrived = self._receive(stage, direction, source, microbatch)
        elif self.chunks > 1:  # recorded, although there is no sender
            posted = np.maximum(
                self._stream(f"{direction}-recv", stage), self._posting(stage, direction)
            )
            arrived = posted + 1e-6
            self._record(f"{direction}-recv", stage, posted, arrived)
            self.stream[f"{direction}-recv", stage] = arrived
        else:
            arrived = self._zeros()
        start = np.maximum(self.clock[stage], arrived)
        if forward and self.data_parallel and (stage, chunk) in self.gathered:
            start = np.maximum(start, self.gathered.pop((stage, chunk)))
        cost = 1 if forward or self.split else 2
        seconds = FORWARD_SECONDS * cost * self.pace(stage, microbatch)
        end = start + seconds * self._noise(self.jitter)
        self._record(f"{direction}-compute", stage, start, end, chunk, at, microbatch)
        self.clock[stage] = end
        self.computed.setdefault((direction, stage), []).append(end)
        self.done[stage].append((direction, end))
        if direction != "backward-weight":
            self._send(stage, direction, at, microbatch, end)
        rest = [key for key in order[position + 1 :] if key[0] != "forward" and key[1] == chunk]
        if self.overlap and self.data_parallel and not forward and not rest:
            posted = np.maximum(self._stream("dp", stage), end)
            self._collective("grads-reduce-scatter", stage, posted, chunk=chunk)
        return True

    def _posting(self, stage: int, direction: str) -> Times:
        """Return when the next receive is posted: after the previous compute of its direction."""
        earlier = self.computed.get((direction, stage))
        if earlier:
            return earlier[-1]
        if direction == "backward" and len(self.done[stage]) >= 2:
            return self.done[stage][-2][1]
        return self._zeros()

    def _receive(self, stage: int, direction: str, source: int, microbatch: int) -> Times:
        sender = source % self.pp
        send = f"{direction}-send"
        row = self.sent.pop((direction, source, microbatch))
        optype, at, sequence, *rest, computed, _ = self.rows[row]
        posted_send = np.maximum(computed, self._stream(send, sender))
        posted = np.maximum(
            self._stream(f"{direction}-recv", stage), self._posting(stage, direction)
        )
        end = np.maximum(posted_send, posted) + TRANSFER_SECONDS * self._noise(self.transfer_jitter)
        self.rows[row] = (optype, at, sequence, *rest, posted_send, end)
        self.stream[send, sender] = end
        self._record(f"{direction}-recv", stage, posted, end)
        self.stream[f"{direction}-recv", stage] = end
        return end

    def _send(self, stage: int, direction: str, at: int, microbatch: int, end: Times) -> None:
        target = at + 1 if direction == "forward" else at - 1
        if 0 <= target < self.pp * self.chunks:
            self.sent[direction, at, microbatch] = len(self.rows)
            self._record(f"{direction}-send", stage, end, end)
        elif self.chunks > 1:  # recorded, although there is no receiver
            posted = np.maximum(end, self._stream(f"{direction}-send", stage))
            self._record(f"{direction}-send", stage, posted, posted + 1e-6)

    def _finish(self, orders: list[list[tuple[str, int, int]]]) -> None:
        ends = sorted({0, self.pp - 1})
        for stage in range(self.pp):
            self._local("gc", stage, 0.0001)
            if self.overlap and self.data_parallel:
                self.clock[stage] = np.maximum(self.clock[stage], self._stream("dp", stage))
            self._local("layernorm-grads-all-reduce", stage, 0.0002)
        together = np.maximum.reduce([self.clock[stage] for stage in ends])
        for stage in ends:
            done = together + COLLECTIVE_SECONDS
            self._record("embedding-grads-all-reduce", stage, self.clock[stage], done)
            self.clock[stage] = done
        for stage in range(self.pp) if self.data_parallel else ():
            if self.overlap:
                self.clock[stage] = self._collective(
                    "separate-grads-all-reduce", stage, self.clock[stage], stream=False
                )
            else:
                for chunk in reversed(range(self.chunks)):
                    self.clock[stage] = self._collective(
                        "grads-reduce-scatter", stage, self.clock[stage], chunk=chunk
                    )
        together = np.maximum.reduce(self.clock).max(axis=1, keepdims=True)
        for stage in range(self.pp):
            done = np.broadcast_to(together + 0.001, (self.steps, self.dp))
            self._record("optimizer-clip-main-grad", stage, self.clock[stage], done)
            self.clock[stage] = done
            self._local("optimizer", stage, 0.02)

    def _local(self, optype: str, stage: int, seconds: float) -> None:
        end = self.clock[stage] + seconds
        self._record(optype, stage, self.clock[stage], end)
        self.clock[stage] = end

    def _collective(
        self, optype: str, stage: int, posted: Times, chunk: int = -1, stream: bool = True
    ) -> Times:
        end = posted.max(axis=1, keepdims=True) + COLLECTIVE_SECONDS
        end = np.broadcast_to(end, posted.shape)
        self._record(optype, stage, posted, end, chunk)
        if stream:
            self.stream["dp", stage] = end
        return end

    def _record(
        self,
        optype: str,
        stage: int,
        start: Times,
        end: Times,
        chunk: int = -1,
        at: int = -1,
        microbatch: int = -1,
    ) -> None:
        sequence = self.sequences.get((optype, stage), 0)
        self.sequences[optype, stage] = sequence + 1
        self.rows.append((optype, stage, sequence, chunk, at, microbatch, start, end))

    def _stream(self, name: str, stage: int) -> Times:
        return self.stream.get((name, stage), self._zeros())

    def _zeros(self) -> Times:
        return np.zeros((self.steps, self.dp))

    def _noise(self, sigma: float) -> Times:
        return (
            self.random.lognormal(0, sigma, (self.steps, self.dp)) if sigma else self._zeros() + 1
        )


def coded(
    columns: dict[str, npt.NDArray[Any]],
) -> tuple[dict[str, npt.NDArray[Any]], tuple[str, ...]]:
    """Return the columns as the reader does: operation types as codes, and their names."""
    names, codes = np.unique(columns["optype"].astype(str), return_inverse=True)
    return {**columns, "optype": codes}, tuple(names.tolist())
