"""The recent steps of a running job in the trace layout.

Durations are as recorded; a worker has those of its slowest tp rank. Timestamps are on one clock:
they come from the replay of the recorded durations, so the clocks of nodes need not agree. Missing
operations are filled in as for the replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline_server.whatif import operations as ops
from paceline_server.whatif.online import Built
from paceline_server.whatif.trace import COLUMNS

Times = npt.NDArray[np.float64]  # [step, dp rank]

_RECEIVE = {ops.FORWARD_SEND: ops.FORWARD_RECV, ops.BACKWARD_SEND: ops.BACKWARD_RECV}
_COMPUTE = {ops.FORWARD_SEND: ops.FORWARD_COMPUTE, ops.BACKWARD_SEND: ops.BACKWARD_COMPUTE}
_UNKNOWN = -1


class _Row(NamedTuple):
    """One operation of a stage, in all steps and dp ranks."""

    optype: str
    stage: int
    chunk: int
    microbatch: int
    start: Times
    end: Times


@dataclass(frozen=True, slots=True)
class Export:
    """A job in the trace layout, with the sizes of the job for the metadata."""

    columns: dict[str, npt.NDArray[Any]]  # `optype` as text
    sizes: dict[str, int]


def export(built: Built, started_seconds: dict[int, float]) -> Export:
    """Return the trace; `started_seconds`: step -> start of the step."""
    window = built.window
    layout = window.layout
    topology = layout.topology
    rows = list(_Exporter(built).rows())
    steps, dp_ranks = np.meshgrid(window.steps, np.arange(layout.dp), indexing="ij")
    began = np.array([started_seconds[step] for step in window.steps])[:, None]
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in COLUMNS}
    counts: dict[tuple[str, int], int] = {}
    for row in rows:
        number = counts.get((row.optype, row.stage), 0)
        counts[row.optype, row.stage] = number + 1
        chunk = _UNKNOWN if row.optype not in ops.COMPUTE else max(row.chunk, 0)
        for name, value in (
            ("dp_rank", dp_ranks),
            ("stage", row.stage),
            ("rank", layout.ranks[row.stage, dp_ranks, 0]),
            ("step", steps),
            ("optype", row.optype),
            ("start_ts", began + row.start),
            ("duration", np.maximum(row.end - row.start, 0.0)),
            ("seq_id", number),
            ("mc", chunk),
            ("mb_id", row.microbatch),
            ("gmc", _UNKNOWN if chunk < 0 else chunk * topology.pp + row.stage),
        ):
            parts[name].append(np.broadcast_to(value, steps.shape).ravel())
    chunks = 1 + max(max(chunk, 0) for chunk in window.order.chunk)
    return Export(
        {name: np.concatenate(values) for name, values in parts.items()},
        {
            "dp_size": layout.dp,
            "pp_size": topology.pp,
            "tp_size": layout.tp,
            "dsp_size": 1,
            "vpp_size": chunks,
            "world_size": topology.world_size,
        },
    )


class _Exporter:
    def __init__(self, built: Built) -> None:
        self.window = built.window
        self.order = built.window.order
        self.ends = built.ends()
        self.starts = self.ends - built.seconds + self.window.pauses
        self.needed = {op for received in self.order.inputs.values() for op in received}

    def rows(self) -> Iterator[_Row]:
        """Yield the rows of all stages; rows of the same type and stage are in order."""
        order, layout = self.order, self.window.layout
        for stage in range(layout.topology.pp):
            yield self._row(order.data_wait[stage])
            for op in order.compute[stage]:
                yield self._row(op)
            for send in _RECEIVE:
                yield from self._sends(stage, send)
                yield from self._receives(stage, send)
            after = self.ends[order.compute[stage][-1]]
            if layout.dp > 1:
                yield self._row(order.reduction[stage], after)
                after = self.ends[order.reduction[stage]]
            yield self._row(order.exchange[stage], after)
            yield self._row(order.optimizer[stage])

    def _row(self, op: int, start: Times | None = None) -> _Row:
        """Return the row of an operation.

        `start`: when the worker is ready for an operation with partners; None: as replayed.
        """
        order = self.order
        start = self.starts[op] if start is None else start
        return _Row(
            order.optype[op],
            order.stage[op],
            order.chunk[op],
            order.microbatch[op],
            start,
            self.ends[op],
        )

    def _sends(self, stage: int, send: str) -> Iterator[_Row]:
        """Yield one send per compute operation, or none if the stage sends nothing.

        The trace layout requires all of them and ignores those at the ends of the model, which have
        no peer.
        """
        order = self.order
        sent = {
            (chunk, microbatch): op
            for (source, _, _, chunk, microbatch), op in order.transfer_of.items()
            if source == stage and order.optype[op] == send and op in self.needed
        }
        for compute in self._compute_operations(stage, send) if sent else ():
            op = sent.get((order.chunk[compute], order.microbatch[compute]))
            made = self.ends[compute]
            end = made if op is None else self.ends[op]
            yield _Row(send, stage, order.chunk[compute], order.microbatch[compute], made, end)

    def _receives(self, stage: int, send: str) -> Iterator[_Row]:
        order = self.order
        operations = self._compute_operations(stage, send)
        if not any(self._received(op, send) for op in operations):
            return
        posted = self.ends[order.data_wait[stage]]
        before = dict(zip(order.compute[stage][1:], order.compute[stage], strict=False))
        for compute in operations:
            if compute in before:
                posted = self.ends[before[compute]]
            received = self._received(compute, send)
            end = self.ends[received[0]] if received else posted
            yield _Row(
                _RECEIVE[send], stage, order.chunk[compute], order.microbatch[compute], posted, end
            )

    def _compute_operations(self, stage: int, send: str) -> list[int]:
        order = self.order
        return [op for op in order.compute[stage] if order.optype[op] == _COMPUTE[send]]

    def _received(self, compute: int, send: str) -> list[int]:
        order = self.order
        return [op for op in order.inputs.get(compute, ()) if order.optype[op] == send]
