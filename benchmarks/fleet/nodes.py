"""The agents of the simulated job, as the server sees them."""

from __future__ import annotations

import functools
import os
import time
from dataclasses import dataclass

from benchmarks.fleet.steps import DP, TP, WORLD, Words
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
    SampleBlock,
    SpanBlock,
)
from paceline_wire.local_token import read_token, state_directory, token_path
from paceline_wire.ring import Frame, GroupDefinition, GroupProgress, Identity, StateView
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

RANKS_PER_NODE = 8
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
_GPU_VALUES = wire.pack_values([value for _ in range(RANKS_PER_NODE) for _, value in _GPU_METRICS])
_GPU_SERIES = wire.pack_series(
    [(name, {"gpu": str(gpu)}) for gpu in range(RANKS_PER_NODE) for name, _ in _GPU_METRICS]
)


@functools.cache
def authorization() -> str:
    """Return the header line with the token that the server made for its user."""
    token = read_token(token_path(state_directory(os.environ), "agent"))
    return f"Authorization: Bearer {token}\r\n"


@dataclass
class Node:
    number: int
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
        """Return a batch as the HTTP request that stores it."""
        body = wire.encode(self.content(sequence, at, **content))
        head = (
            f"POST /api/v1/ingest HTTP/1.1\r\nHost: 127.0.0.1\r\n{authorization()}"
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

    def samples(self, at: float) -> list[SampleBlock]:
        return [SampleBlock(_GPU_SERIES, _GPU_VALUES, int(at * 1e9))]


@dataclass
class Rank:
    """Return the agent's report of one rank."""

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
                frames=[Frame(Op.FORWARD, step_started_ns, 0, None, 0)],
                groups=[
                    GroupProgress(group, calls, calls, step_started_ns, Op.ALL_REDUCE)
                    for group, calls in ((WORLD, step), (TP, 24 * step), (DP, step))
                ],
                peers=[],
            ),
        )

    def block(self, words: list[Words]) -> SpanBlock:
        place = self.topology.coordinates(self.number)
        columns = words[place.pp_rank][:, :, place.dp_rank, place.tp_rank].tobytes()
        return SpanBlock(self.job, self.generation, self.number, columns, self.clock_offset_ns)
