"""The cost of a record's path from the ring to the server's memory: read, pack, encode, decode.

Measured in CPU seconds of this process, for a window of one node as an agent sends it (8 ranks,
3,200 samples). The baseline is the same window as rows of JSON (the standard library's), in the
same run.
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
    batch = _batch()
    payload, text = encode(batch), _to_json(batch)
    costs: dict[str, list[int]] = {"encode": [], "decode": [], "to_json": [], "from_json": []}
    for _ in range(REPEATS):
        for name, code in {
            "encode": lambda: encode(batch),
            "decode": lambda: [from_columns(block.columns) for block in decode(payload).spans],
            "to_json": lambda: _to_json(batch),
            "from_json": lambda: json.loads(text),
        }.items():
            started = process_time_ns()
            code()
            costs[name].append(process_time_ns() - started)
    count = RECORDS + SAMPLES
    rate = {name: count / median(taken) * 1e9 for name, taken in costs.items()}
    spans_only = Batch(agent_id="a", boot_id="b", sequence=0, packed_ns=0, spans=batch.spans)
    yield Result(
        "batch: bytes per span",
        len(encode(spans_only)) / RECORDS,
        "B",
        len(_to_json(spans_only)) / RECORDS,
        goal=16,
    )
    yield Result("batch: bytes per record", len(payload) / count, "B", len(text) / count)
    for name, baseline in (("encode", "to_json"), ("decode", "from_json")):
        yield Result(
            f"batch: {name}", rate[name], "records/CPU-s", rate[baseline], more_is_better=True
        )


def _to_json(batch: Batch) -> bytes:
    """Encode each record as a JSON list, as a simple service would."""
    spans = [
        list(RECORD.unpack_from(records, offset))
        for records in (from_columns(block.columns) for block in batch.spans)
        for offset in range(0, len(records), RECORD_BYTES)
    ]
    samples = [
        [one.name, one.labels, one.value, one.time_ns]
        for block in batch.blocks
        for one in block.samples()
    ]
    return json.dumps({"spans": spans, "samples": samples}, separators=(",", ":")).encode()


def _batch() -> Batch:
    seed = random.Random(1)
    return Batch(
        agent_id="node-0",
        boot_id="boot",
        sequence=1,
        packed_ns=0,
        spans=[_spans(rank, seed) for rank in range(RANKS)],
        blocks=[_samples(sweep, seed) for sweep in range(SAMPLES // SERIES)],
    )


def _samples(sweep: int, seed: random.Random) -> SampleBlock:
    """Return forty metrics of eight GPUs."""
    series = [
        (
            f"DCGM_FI_DEV_{number % 40}",
            {"gpu": str(number % 8), "UUID": f"GPU-{number % 8:032d}"},
        )
        for number in range(SERIES)
    ]
    values = [float(seed.randrange(1000)) for _ in series]
    at_ns = 1_700_000_000_000_000_000 + sweep * 1_000_000_000
    return SampleBlock(pack_series(series), pack_values(values), at_ns)


def _spans(rank: int, seed: random.Random) -> SpanBlock:
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
    records = b"".join(word.to_bytes(8, "little") for word in words)
    return SpanBlock("bench", 0, rank, to_columns(records), 0)
