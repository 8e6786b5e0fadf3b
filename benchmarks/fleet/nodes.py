"""Agents of a played job as far as the server can see them: batches, sent when they are due."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from benchmarks.fleet.steps import DP, TP, PlayedJob, Words
from paceline_wire import batch as wire
from paceline_wire.batch import (
    AgentHello,
    Batch,
    Event,
    GpuInfo,
    RankAttached,
    RankDefined,
    RankStarted,
    RankState,
    Sample,
    SpanBlock,
)
from paceline_wire.ring import GroupDefinition, Identity, StateView
from paceline_wire.topology import Topology

RANKS_PER_NODE = 8
_FIRST_PLANNED = 1 << 20  # sequence numbers below it are those of heartbeats
_GPU_METRICS = (
    ("DCGM_FI_DEV_SM_CLOCK", 1980.0),
    ("DCGM_FI_DEV_GPU_TEMP", 61.0),
    ("DCGM_FI_DEV_POWER_USAGE", 640.0),
    ("DCGM_FI_DEV_GPU_UTIL", 98.0),
    ("DCGM_FI_DEV_MEM_CLOCK", 2619.0),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 0.0),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0),
    ("DCGM_FI_DEV_POWER_VIOLATION", 0.0),
)


@dataclass(frozen=True, slots=True)
class Planned:
    due: float  # time.time()
    request: bytes
    step: int | None = None  # whose spans it holds


@dataclass
class Node:
    number: int
    planned: list[Planned] = field(default_factory=list)
    beats: int = 0

    @property
    def agent_id(self) -> str:
        return f"node-{self.number:05d}"

    @property
    def ranks(self) -> range:
        return range(self.number * RANKS_PER_NODE, (self.number + 1) * RANKS_PER_NODE)

    def content(self, sequence: int, at: float, **content: object) -> Batch:
        return Batch(
            agent_id=self.agent_id,
            boot_id="boot",
            sequence=sequence,
            packed_ns=int(at * 1e9),
            **content,  # type: ignore[arg-type]
        )

    def batch(self, sequence: int, at: float, **content: object) -> bytes:
        """As the request that stores it."""
        body = wire.encode(self.content(sequence, at, **content))
        head = (
            "POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {wire.CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def hello(self) -> AgentHello:
        gpus = [
            GpuInfo(gpu, f"GPU-{self.number}-{gpu}", "H200", f"{gpu:02x}:00.0")
            for gpu in range(RANKS_PER_NODE)
        ]
        return AgentHello(
            time_ns=time.time_ns(),
            hostname=self.agent_id,
            version="0",
            address="127.0.0.1",
            rendezvous_port=29500,
            slots=RANKS_PER_NODE,
            gpus=gpus,
        )

    def samples(self, at: float) -> list[Sample]:
        return [
            Sample(name, {"gpu": str(gpu)}, value, int(at * 1e9))
            for gpu in range(RANKS_PER_NODE)
            for name, value in _GPU_METRICS
        ]


@dataclass
class Rank:
    """What its agent tells of one rank."""

    job: str
    generation: int
    number: int
    topology: Topology
    clock_offset_ns: int

    def beginning(self) -> list[Event]:
        place, now_ns = self.topology.coordinates(self.number), time.time_ns()
        identity = Identity(
            job=self.job,
            generation=self.generation,
            rank=self.number,
            local_rank=self.number % RANKS_PER_NODE,
            world_size=self.topology.world_size,
            topology=self.topology,
            coordinates=place,
            pid=4000 + self.number,
            host="host",
            clock_offset_ns=self.clock_offset_ns,
            started_ns=1,
        )
        tp = [
            self.topology.rank(place.dp_rank, place.pp_rank, one) for one in range(self.topology.tp)
        ]
        dp = [
            self.topology.rank(one, place.pp_rank, place.tp_rank) for one in range(self.topology.dp)
        ]
        name = {"job": self.job, "generation": self.generation, "rank": self.number}
        groups = [GroupDefinition(TP, "tp", tp, "tp"), GroupDefinition(DP, "dp", dp, "dp")]
        return [
            RankStarted(time_ns=now_ns, pid=identity.pid, **name),
            RankAttached(time_ns=now_ns, identity=identity),
            RankDefined(time_ns=now_ns, definitions=groups, **name),
        ]

    def state(self, at: float, step: int, step_started_ns: int) -> RankState:
        return RankState(
            time_ns=int(at * 1e9),
            job=self.job,
            generation=self.generation,
            rank=self.number,
            clock_offset_ns=self.clock_offset_ns,
            process_state="R",
            cpu_seconds=at % 1e6,
            view=StateView(
                head=step * 100,
                step=step,
                step_started_ns=step_started_ns,
                microbatch=None,
                status="running",
                loss_step=step - 1 if step else None,
                loss=2.0 if step else None,
                gradient_norm=1.0 if step else None,
                evaluation_step=None,
                evaluation_loss=None,
                frames=[],
                groups=[],
                peers=[],
            ),
        )

    def block(self, words: list[Words]) -> SpanBlock:
        place = self.topology.coordinates(self.number)
        columns = words[place.pp_rank][:, :, place.dp_rank, place.tp_rank].tobytes()
        return SpanBlock(self.job, self.generation, self.number, columns, self.clock_offset_ns)


class Planner:
    """Turns played steps into what each node sends, and when."""

    def __init__(self, job: PlayedJob, nodes: list[Node], ranks: list[Rank], start: float) -> None:
        self._job = job
        self._nodes = nodes
        self._ranks = ranks
        self._start = start  # time.time() of the job's time 0
        chance = np.random.default_rng(1)
        self._phase: list[float] = chance.random(len(nodes)).tolist()

    def begin(self, node: Node, events: list[Event]) -> None:
        due = self._start + self._phase[node.number] * 0.5
        node.planned.append(Planned(due, node.batch(_FIRST_PLANNED, due, events=events)))

    def step(self, words: list[Words], batch_seconds: float) -> float:
        """Each node's batches until the end of this step, the last with its spans."""
        step = self._job.step - 1
        ended = self._start + self._job.now_ns / 1e9
        for node in self._nodes:
            ranks = [self._ranks[number] for number in node.ranks]
            due = ended + self._phase[node.number] * batch_seconds
            known = node.planned[-1].due if node.planned else due - batch_seconds
            beats = max(round((due - known) / batch_seconds), 1)
            for beat in range(1, beats):
                self._add(node, known + beat * (due - known) / beats, ranks, step, [])
            self._add(node, due, ranks, step, [rank.block(words) for rank in ranks])
        return ended

    def _add(
        self, node: Node, due: float, ranks: list[Rank], step: int, blocks: list[SpanBlock]
    ) -> None:
        now = self._job.now_ns
        done = step + 1 if blocks else step
        request = node.batch(
            _FIRST_PLANNED + len(node.planned),
            due,
            events=[rank.state(due, done, now) for rank in ranks],
            spans=blocks,
            samples=node.samples(due),
        )
        node.planned.append(Planned(due, request, step if blocks else None))


class Connections:
    """One for each node, kept open. `acknowledged`: when a step's last batch was, by step."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.acknowledged: dict[int, float] = defaultdict(float)
        self.seconds: list[float] = []  # each request's
        self.refused = 0
        self.latest = 0.0  # how much later than due a batch was sent at most

    async def send(self, node: Node, request: bytes) -> None:
        """Until it is stored, as an agent does."""
        began = time.perf_counter()
        while (status := await self._try(node, request)) != 200:
            assert status in (0, 503), status
            self.refused += 1
            await asyncio.sleep(0.1)
        self.seconds.append(time.perf_counter() - began)

    async def listen(self, node: Node) -> None:
        """Hold a stream of commands open, as each agent does; there are none but to start ranks."""
        reader, writer = await asyncio.open_connection(*self._address)
        path = f"/api/v1/agents/{node.agent_id}/commands"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()

    async def follow_plan(self, node: Node) -> None:
        for planned in node.planned:
            await asyncio.sleep(planned.due - time.time())
            self.latest = max(self.latest, time.time() - planned.due)
            await self.send(node, planned.request)
            if planned.step is not None:
                known = self.acknowledged[planned.step]
                self.acknowledged[planned.step] = max(known, time.time())

    async def _try(self, node: Node, request: bytes) -> int:
        """The status; 0: no answer."""
        try:
            if node.number not in self._open:
                self._open[node.number] = await asyncio.open_connection(*self._address)
            reader, writer = self._open[node.number]
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            return int(head.split(b" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError):
            self._open.pop(node.number, None)
            return 0

    def close(self) -> None:
        for _, writer in self._open.values():
            writer.close()
