"""The ideal run as a Chrome trace, for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline_server.whatif import operations as ops
from paceline_server.whatif.analysis import PreparedTrace
from paceline_server.whatif.replay import replay, starts
from paceline_server.whatif.trace import Trace

# Lanes of a stage, in the order in which the viewer shows them.
STREAMS = (
    "compute",
    "forward send",
    "forward recv",
    "backward send",
    "backward recv",
    "collectives",
)
STREAM_OF = {
    ops.FORWARD_SEND: 1,
    ops.FORWARD_RECV: 2,
    ops.BACKWARD_SEND: 3,
    ops.BACKWARD_RECV: 4,
    ops.PARAMS_ALL_GATHER: 5,
    ops.GRADS_REDUCE_SCATTER: 5,
}


def ideal_timeline(step: PreparedTrace, trace: Trace) -> dict[str, Any]:
    """Return one step of one pipeline: in the ideal run all steps and dp ranks are equal."""
    return {"traceEvents": list(_events(step, trace)), "displayTimeUnit": "ms"}


def _events(step: PreparedTrace, trace: Trace) -> Iterator[dict[str, Any]]:
    for stage in range(trace.stage_count):
        name = f"stage {stage} (ranks {', '.join(map(str, trace.ranks[:4, stage].tolist()))}"
        name += ", ...)" if len(trace.ranks) > 4 else ")"
        yield _named("process_name", stage, 0, name)
        for lane, stream in enumerate(STREAMS):
            yield _named("thread_name", stage, lane, stream)
    ends = replay(step.model, step.ideal[:, None, None].copy())
    begins = starts(step.model, ends)[:, 0, 0].tolist()
    operations = trace.operations
    for place, op in enumerate(step.model.order.tolist()):
        optype = operations.optype[op]
        yield {
            "ph": "X",
            "name": optype,
            "cat": ops.group(optype),
            "pid": int(operations.stage[op]),
            "tid": STREAM_OF.get(optype, 0),
            "ts": begins[place] * 1e6,
            "dur": float(ends[place, 0, 0] - begins[place]) * 1e6,
            "args": {
                "seq_id": int(operations.sequence[op]),
                "mb_id": int(operations.microbatch[op]),
                "mc": int(operations.chunk[op]),
            },
        }


def _named(kind: str, stage: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": stage, "tid": lane, "args": {"name": name}}
