"""Fuzzing targets: every reader of bytes from another user, node or program.

A target takes any bytes. Invalid bytes must be rejected with the reader's own error; any other
exception is a bug and ends the fuzzing. `read` returns whether the bytes were accepted.
"""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy

from paceline_agent.collect.kernel_log import Recognizer, parse, records_of
from paceline_agent.collect.kernel_log.relevance import RelevantLines
from paceline_agent.collect.kernel_log.rules import RULES
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings.reader import Rings
from paceline_server.flight_recorder import FlightRecorderError, report
from paceline_server.ingest.check import check
from paceline_server.settings import Settings
from paceline_server.whatif.analysis import analyze, prepare
from paceline_server.whatif.errors import WhatIfError
from paceline_server.whatif.reader import read_trace
from paceline_wire import batch as wire
from paceline_wire import ring as layout
from paceline_wire.batch import Batch, BatchError, DeviceEvent, RankExited, Sample, SpanBlock
from paceline_wire.ring import GroupDefinition, Identity, SectionDefinition
from paceline_wire.spans import RECORD_BYTES
from paceline_wire.topology import Coordinates, Topology
from tests.server.conftest import RunningServer

TESTS = Path(__file__).parents[1]
_MEMORY = Path("/dev/shm")
_IDENTITY = Identity(
    job="job-1",
    generation=2,
    rank=3,
    local_rank=1,
    world_size=8,
    topology=Topology(2, 2, 2),
    coordinates=Coordinates(1, 0, 1),
    pid=1 << 22,  # no such process
    host="node-1",
    clock_offset_ns=-5,
    started_ns=17,
    gpu_uuid="GPU-0",
    metadata={"schedule": "1f1b"},
)


class FuzzTarget(ABC):
    """A reader and valid inputs for it; a context manager, because some targets need a server."""

    longest_bytes = 1 << 14

    def __enter__(self) -> FuzzTarget:
        parent = _MEMORY if _MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-fuzz-", dir=parent))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.directory)

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Return valid inputs."""

    @abstractmethod
    def read(self, data: bytes) -> bool:
        """Read any bytes; return whether they were accepted."""

    def finish(self) -> None:  # noqa: B027 (most have nothing to check)
        """Check the conditions that must hold after all inputs."""


def _batches() -> list[Batch]:
    exit_event = RankExited(
        time_ns=5,
        job="job-1",
        generation=1,
        rank=0,
        pid=7,
        exit_code=None,
        signal=9,
        commanded=False,
        drained=False,
        log_tail="killed",
    )
    device = DeviceEvent(time_ns=6, kind="xid", device="0000:9b:00.0", detail="79")
    samples = [Sample("paceline_gpu_power_watts", {"gpu": str(n)}, 300.5 + n, 7) for n in range(8)]
    spans = [SpanBlock("job-1", 1, 0, bytes(2 * RECORD_BYTES), -5)]
    return [
        Batch(agent_id="node-0", boot_id="b", sequence=1, packed_ns=1),
        Batch(
            agent_id="node-0",
            boot_id="b",
            sequence=2,
            packed_ns=2,
            samples=samples,
            events=[exit_event, device],
            spans=spans,
        ),
    ]


class PackedBatch(FuzzTarget):
    """A batch that is damaged in transit: only the one that an agent packed may be accepted."""

    def seeds(self) -> Sequence[bytes]:
        return [wire.encode(batch) for batch in _batches()]

    def read(self, data: bytes) -> bool:
        batch = _accepted_batch(data)
        return batch is not None and batch not in _batches()


class BatchContent(FuzzTarget):
    """The content of a correctly packed batch: if it is accepted, it can be sent again."""

    def seeds(self) -> Sequence[bytes]:
        return [msgspec.msgpack.encode(batch) for batch in _batches()]

    def read(self, data: bytes) -> bool:
        return _accepted_batch(wire.pack_content(data)) is not None


def _accepted_batch(payload: bytes) -> Batch | None:
    try:
        batch = wire.decode(payload)
        check(batch)
    except BatchError:
        return None
    assert len(batch.samples) <= wire.MAXIMUM_SAMPLES
    assert len(batch.events) <= wire.MAXIMUM_EVENTS
    assert wire.decode(wire.encode(batch)) == batch
    return batch


class RingContent(FuzzTarget):
    """A ring file of a rank, read by the agent."""

    longest_bytes = layout.SPANS_OFFSET + 64 * RECORD_BYTES
    # shorter input is used as it is; other input is extended to a ring's size, so that more of it
    # is read
    _SHORT_BYTES = 64

    def __enter__(self) -> FuzzTarget:
        super().__enter__()
        self._rings = self.directory / "rings"
        self._rings.mkdir(0o700)
        self._processes = self.directory / "proc"
        self._processes.mkdir()
        self._path = self._rings / "job-1.g2.r3.ring"
        return self

    def seeds(self) -> Sequence[bytes]:
        path = self.directory / "seed.ring"
        ring = layout.create(path, _IDENTITY, 64)
        layout.define(ring, SectionDefinition(0, "attention"))
        layout.define(ring, GroupDefinition(1, "tp", [2, 3], "tp"))
        ring.state[layout.STATE_HEAD] = 5
        ring.close()
        return [path.read_bytes()]

    def read(self, data: bytes) -> bool:
        if len(data) > self._SHORT_BYTES:
            data = data.ljust(self.longest_bytes, b"\0")
        self._path.write_bytes(data)
        outbox = Outbox()
        rings = Rings(self._rings, outbox, self._processes)
        rings.attach_existing({})
        attached = bool(len(rings)) or not self._path.exists()
        rings.poll()
        rings.poll()
        rings.close()
        return attached


class KernelLog(FuzzTarget):
    """Lines of a kernel log, in any format. A log is never rejected, so each input is accepted."""

    longest_bytes = 4096

    def __init__(self) -> None:
        self._relevant = RelevantLines(RULES)

    def seeds(self) -> Sequence[bytes]:
        logs = sorted((TESTS / "agent" / "fixtures" / "kmsg").iterdir())
        lines = [line for log in logs for line in log.read_bytes().splitlines()]
        return [b"\n".join(lines[at : at + 20]) for at in range(0, len(lines), 20)][:200]

    def read(self, data: bytes) -> bool:
        lines = data.split(b"\n")
        parse((line.decode("utf-8", "replace") for line in lines), now_ns=1)
        recognizer = Recognizer()
        for line in lines:
            if not self._relevant.matches(line):
                text = line.decode("utf-8", "replace")
                for record in records_of(text):
                    assert recognizer.recognize(record.message, record.times) is None, line
        return True


class FlightRecorderDump(FuzzTarget):
    """A dump of PyTorch's Flight Recorder, as pickle or JSON."""

    def __enter__(self) -> FuzzTarget:
        super().__enter__()
        (self.directory / "dump_1").write_bytes(pickle.dumps(_dump(1)))
        return self

    def seeds(self) -> Sequence[bytes]:
        return [
            *(pickle.dumps(_dump(0), protocol) for protocol in (0, 2, 4)),
            json.dumps(_dump(0)).encode(),
            b"\x80\x04c__builtin__\neval\n\x8c\x011\x85R.",
        ]

    def read(self, data: bytes) -> bool:
        (self.directory / "dump_0").write_bytes(data)
        try:
            found = report(self.directory)
        except FlightRecorderError:
            return False
        json.dumps(found.as_json())
        return not found.notes


def _dump(rank: int) -> dict[str, Any]:
    entry = {
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "profiling_name": "nccl:all_reduce",
        "p2p_seq_id": 0,
        "is_p2p": False,
        "retired": False,
        "input_sizes": [[8]],
        "output_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "frames": [{"name": "step", "filename": "train.py", "line": 12}],
    }
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": 3 - rank, "last_completed_collective": 1}},
        "entries": [
            entry
            | {
                "record_id": number,
                "collective_seq_id": number + 1,
                "state": "completed" if number == 0 else "scheduled",
                "time_created_ns": 1_000 + number,
                "time_discovered_started_ns": None,
            }
            for number in range(3 - rank)
        ],
    }


class TraceFile(FuzzTarget):
    """The bytes of a Parquet trace for the what-if analysis."""

    longest_bytes = 1 << 17

    def seeds(self) -> Sequence[bytes]:
        return [(TESTS / "server" / "whatif" / "data" / "trace-ST.parquet").read_bytes()]

    def read(self, data: bytes) -> bool:
        path = self.directory / "trace.parquet"
        path.write_bytes(data)
        try:
            trace = read_trace(path)
            analyze(trace, prepare(trace))
        except WhatIfError:
            return False
        return True


class HttpRequest(FuzzTarget):
    """The bytes of a connection to the server, without a valid token: nothing may be stored."""

    longest_bytes = 4096

    def __enter__(self) -> FuzzTarget:
        super().__enter__()
        self._url = f"sqlite:///{self.directory}/fuzz.db"
        self._server = RunningServer(Settings(database_url=self._url, port=0, role="api"))
        self._server.start()
        self._address = ("127.0.0.1", int(self._server.url.rpartition(":")[2]))
        self._engine = sqlalchemy.create_engine(self._url)
        (tables := sqlalchemy.MetaData()).reflect(self._engine)
        count = sqlalchemy.func.count()
        counts = [
            sqlalchemy.select(count).select_from(table).scalar_subquery().label(name)
            for name, table in tables.tables.items()
        ]
        assert counts
        self._counts = sqlalchemy.select(*counts)
        self._rows_before = self._rows()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()
        self._server.stop()
        super().__exit__()

    def seeds(self) -> Sequence[bytes]:
        host = b"Host: 127.0.0.1\r\n"
        batch = wire.encode(_batches()[0])
        ingest = b"Content-Type: " + wire.CONTENT_TYPE.encode() + b"\r\n"
        node_key = b"X-Paceline-Node-Key: " + b"k" * 43 + b"\r\n"
        token = b"Authorization: Bearer paceline_" + b"x" * 43 + b"\r\n"
        reads = ("jobs", "nodes", "incidents", "actions?limit=5", "audit", "events", "caller")
        return [
            *(b"GET /api/v1/%s HTTP/1.1\r\n%s\r\n" % (path.encode(), host) for path in reads),
            b"GET /metrics HTTP/1.1\r\n" + host + b"\r\n",
            b"GET /?a=%FF&cursor=AAAA HTTP/1.0\r\n\r\n",
            b"GET /api/v1/jobs?cursor=eyJ9&limit=-1 HTTP/1.1\r\n" + host + token + b"\r\n",
            b"POST /api/v1/jobs HTTP/1.1\r\n"
            + host
            + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /api/v1/ingest HTTP/1.1\r\n%s%s%s%sContent-Length: %d\r\n\r\n%s"
            % (host, ingest, node_key, token, len(batch), batch),
            b"POST /api/v1/login-links HTTP/1.1\r\n"
            + host
            + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\n" + host + b"\r\n",
        ]

    def read(self, data: bytes) -> bool:
        with socket.create_connection(self._address, timeout=30.0) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            # A stream of events does not end, so its head is enough.
            while b"text/event-stream" not in answer and (more := _receive(connection)):
                answer = (answer + more)[: 1 << 16]
        if not answer:
            return False
        status = int(answer.split(b" ", 2)[1])
        assert status < 500, answer
        return status < 300

    def finish(self) -> None:
        assert self._rows() == self._rows_before

    def _rows(self) -> dict[str, int]:
        with self._engine.connect() as connection:
            return dict(connection.execute(self._counts).one()._mapping)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:  # the server closed while bytes were unread
        return b""


TARGETS: dict[str, type[FuzzTarget]] = {
    "packed-batch": PackedBatch,
    "batch-content": BatchContent,
    "ring": RingContent,
    "kernel-log": KernelLog,
    "flight-recorder": FlightRecorderDump,
    "trace": TraceFile,
    "http": HttpRequest,
}
