"""The cost of a record's path from the ring to the server's memory: read, pack, encode, decode.

Measured in CPU seconds of this process, for a window of one node as an agent sends it (8 ranks,
3,200 samples). Encoding starts from what the agent has, the records of the rings and the values of
each sweep, and includes packing them. The baseline is the same window as rows of JSON (the standard
library's), from the same records and values, in the same run.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import process_time_ns

from benchmarks.harness import Result
from paceline.recorder import Recorder
from paceline_wire.batch import (
    Batch,
    SampleBlock,
    SpanBlock,
    decode,
    encode,
    pack_series,
    pack_values,
)
from paceline_wire.ring import Identity, RingReader, create
from paceline_wire.spans import NONE_16, NONE_32, RECORD, RECORD_BYTES, Op, from_columns, to_columns
from paceline_wire.topology import Coordinates, Topology

RANKS = 8
RECORDS = 5000 // RANKS * RANKS
SAMPLES, SERIES = 3200, 320
REPEATS = 15


def measure() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield from _ring(Path(directory))
    yield from _codec()


def _ring(directory: Path) -> Iterator[Result]:
    identity = Identity(
        job="bench",
        generation=0,
        rank=0,
        local_rank=0,
        world_size=1,
        topology=Topology(),
        coordinates=Coordinates(),
        pid=os.getpid(),
        host="here",
        clock_offset_ns=0,
        started_ns=0,
    )
    recorder = Recorder(create(directory / "bench.ring", identity))
    reader = RingReader(directory / "bench.ring")
    rates = []
    for _ in range(REPEATS):
        for number in range(16_000):
            recorder.write(Op.FORWARD, number, NONE_32, 0, 0, number, 10)
        started = process_time_ns()
        records = reader.read()
        to_columns(records)
        rates.append(len(records) / RECORD_BYTES / (process_time_ns() - started) * 1e9)
    yield Result("ring to columns", median(rates), "records/CPU-s", goal=5e6, more_is_better=True)


def _codec() -> Iterator[Result]:
    window = _Window()
    batch = window.batch()
    payload, text = encode(batch), window.to_json()
    costs: dict[str, list[int]] = {"encode": [], "decode": [], "to_json": [], "from_json": []}
    for _ in range(REPEATS):
        for name, code in {
            "encode": lambda: encode(window.batch()),
            "decode": lambda: [from_columns(block.columns) for block in decode(payload).spans],
            "to_json": window.to_json,
            "from_json": lambda: json.loads(text),
        }.items():
            started = process_time_ns()
            code()
            costs[name].append(process_time_ns() - started)
    count = RECORDS + SAMPLES
    rate = {name: count / median(taken) * 1e9 for name, taken in costs.items()}
    window.values.clear()
    spans_only = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, spans=batch.spans)
    yield Result(
        "batch: bytes per span",
        len(encode(spans_only)) / RECORDS,
        "B",
        len(window.to_json()) / RECORDS,
        goal=16,
    )
    yield Result("batch: bytes per record", len(payload) / count, "B", len(text) / count)
    for name, baseline in (("encode", "to_json"), ("decode", "from_json")):
        yield Result(
            f"batch: {name}", rate[name], "records/CPU-s", rate[baseline], more_is_better=True
        )


class _Window:
    """A window as the agent has it: the records of each rank and the values of each sweep."""

    def __init__(self) -> None:
        seed = random.Random(1)
        self.records = [_records(rank, seed) for rank in range(RANKS)]
        self.values = [
            [float(seed.randrange(1000)) for _ in range(SERIES)] for _ in range(SAMPLES // SERIES)
        ]
        # Forty metrics of eight GPUs. An agent packs the series once.
        self.series = [
            (
                f"DCGM_FI_DEV_{number % 40}",
                {"gpu": str(number % 8), "UUID": f"GPU-{number % 8:032d}"},
            )
            for number in range(SERIES)
        ]
        self._packed = pack_series(self.series)

    def batch(self) -> Batch:
        return Batch(
            agent_id="node-0",
            boot_id="boot",
            sequence=1,
            packed_ns=0,
            spans=[
                SpanBlock("bench", 0, rank, to_columns(records), 0)
                for rank, records in enumerate(self.records)
            ],
            blocks=[
                SampleBlock(self._packed, pack_values(values), _sweep_ns(sweep))
                for sweep, values in enumerate(self.values)
            ],
        )

    def to_json(self) -> bytes:
        """Encode each record as a JSON list, as a simple service would."""
        spans = [row for records in self.records for row in RECORD.iter_unpack(records)]
        samples = [
            (name, labels, value, _sweep_ns(sweep))
            for sweep, values in enumerate(self.values)
            for (name, labels), value in zip(self.series, values, strict=True)
        ]
        return json.dumps({"spans": spans, "samples": samples}, separators=(",", ":")).encode()


def _sweep_ns(sweep: int) -> int:
    return 1_700_000_000_000_000_000 + sweep * 1_000_000_000


def _records(rank: int, seed: random.Random) -> bytes:
    """Return steps of 8 microbatches with jitter, as a pipeline rank writes them."""
    ops = (Op.FORWARD_RECV, Op.FORWARD, Op.ALL_REDUCE, Op.FORWARD_SEND, Op.BACKWARD)
    words, now = [], 10**12
    for index in range(RECORDS // RANKS):
        op = ops[index % len(ops)]
        step, microbatch = index // 40, index // 5 % 8
        duration = int(seed.gauss(20e6, 1e6))
        transfer = op in (Op.FORWARD_RECV, Op.FORWARD_SEND)
        words += [
            index,
            op | (1 << 16 if op == Op.ALL_REDUCE else 0) | (0 if op < 16 else NONE_16) << 32,
            step | microbatch << 32,
            (rank + 2) % RANKS if transfer else NONE_32,
            4_194_304 if op != Op.FORWARD and op != Op.BACKWARD else 0,
            index // 5 + 1 if op != Op.FORWARD and op != Op.BACKWARD else 0,
            now,
            duration,
        ]
        now += duration + seed.randrange(100_000)
    return b"".join(word.to_bytes(8, "little") for word in words)
