"""A simulated agent with its ranks, over real HTTP and in real time.

Like a real agent it keeps each batch until it was acknowledged, carries out each command id once,
and kills ranks by generation. Ranks "train" one step each `STEP_SECONDS` until a command stops
them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import httpx

from paceline_wire import batch as wire
from paceline_wire import commands, spans
from paceline_wire.batch import (
    AgentHello,
    Batch,
    CommandResult,
    Event,
    GpuInfo,
    RankAcknowledged,
    RankAttached,
    RankExited,
    RankStarted,
    RankState,
    SpanBlock,
)
from paceline_wire.local_token import LocalScope, find_token
from paceline_wire.ring import Identity, StateView
from paceline_wire.spans import NONE_16, NONE_32, Op
from paceline_wire.topology import Topology

STEP_SECONDS = 0.2
_BATCH_SECONDS = 0.1
_HEADERS = {"Content-Type": wire.CONTENT_TYPE}


def hello(slots: int = 1) -> AgentHello:
    return AgentHello(
        time_ns=time.time_ns(),
        hostname="host",
        version="0",
        address="127.0.0.1",
        rendezvous_port=29500,
        slots=slots,
        gpus=[GpuInfo(index, f"GPU-{index}", "H200", f"0{index}:00.0") for index in range(slots)],
    )


def view(step: int) -> StateView:
    return StateView(
        head=step,
        step=step,
        step_started_ns=time.monotonic_ns(),
        microbatch=None,
        status="running",
        loss_step=step - 1 if step else None,
        loss=2.0 if step else None,
        gradient_norm=None,
        evaluation_step=None,
        evaluation_loss=None,
        frames=[],
        groups=[],
        peers=[],
        can_checkpoint=True,
        can_stop=True,
    )


@dataclass
class SimulatedRank:
    start: commands.StartRanks
    rank: int
    pid: int
    step: int
    stepped: float  # when its latest step ended, or its first begins
    index: int = 0
    stop_at: tuple[int, int] | None = None  # (command id, step)


class SimulatedNode:
    """A simulated node. `url` may change, because a restarted server may listen on another port."""

    def __init__(self, agent_id: str, url: str, token: str | None = None) -> None:
        self.agent_id = agent_id
        self.url = url
        self.carried_out: list[commands.Command] = []
        self.acknowledged = 0
        self.start_error = ""  # why it starts no rank
        self.startup_seconds = 0.0  # until the first step of its ranks
        self.ranks: dict[int, SimulatedRank] = {}
        self._token = token
        self._events: list[Event] = [hello()]
        self._attached: dict[int, Identity] = {}
        self._unsent: deque[bytes] = deque()
        self._sequence = 0
        self._seen: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self._stream: socket.socket | None = None  # that commands come from
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._send, self._listen)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._gone.set()
        stream = self._stream
        if stream is not None:  # Its next line may be seconds away.
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)

    def crash(self, rank: int) -> None:
        with self._lock:
            self._exit(self.ranks[rank], signal=9)

    def run_external(
        self,
        job: str,
        rank: int,
        topology: Topology,
        *,
        generation: int = 0,
        pid: int | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        user: int | None = None,
    ) -> None:
        """Add a rank that was started outside Paceline on this node."""
        command = commands.StartRanks(
            command_id=0,
            job=job,
            generation=generation,
            topology=topology,
            ranks=[],
            argv=[],
            environment={},
            directory=None,
            master_address="",
            master_port=0,
            checkpoint_directory=None,
        )
        with self._lock:
            self._start_rank(command, commands.RankSpec(rank, 0, None), pid, metadata, user)
            self._events = [one for one in self._events if not isinstance(one, RankStarted)]

    def report_again(self, rank: int) -> None:
        """Report the rank again, as a restarted agent does for ranks it adopts."""
        self.report(RankAttached(time_ns=time.time_ns(), identity=self._attached[rank]))

    def finish(self, rank: int) -> None:
        with self._lock:
            self._exit(self.ranks[rank], exit_code=0)

    def vanish(self, rank: int) -> None:
        """End a rank without an exit code, like the child of another process."""
        with self._lock:
            self._exit(self.ranks[rank])

    def report(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def _bearer(self) -> dict[str, str]:
        if self._token is None:
            return bearer(self.url, "agent")
        return {"Authorization": f"Bearer {self._token}"}

    # --- batches ---------------------------------------------------------------------------

    def _send(self) -> None:
        with httpx.Client(headers=self._bearer() | _HEADERS, verify=False) as client:
            while not self._gone.wait(_BATCH_SECONDS):
                with self._lock:
                    self._unsent.append(wire.encode(self._batch()))
                self._flush(client)

    def _flush(self, client: httpx.Client) -> None:
        while self._unsent and not self._gone.is_set():
            try:
                answer = client.post(f"{self.url}/api/v1/ingest", content=self._unsent[0])
            except httpx.TransportError:
                return
            if answer.status_code != 200:
                assert answer.status_code == 503, answer.text
                return
            self._unsent.popleft()
            self.acknowledged += 1

    def _batch(self) -> Batch:
        blocks: list[SpanBlock] = []
        for rank in list(self.ranks.values()):
            blocks += self._train(rank)
        batch = Batch(
            agent_id=self.agent_id,
            boot_id="boot-1",
            sequence=self._sequence,
            packed_ns=time.time_ns(),
            events=self._events,
            spans=blocks,
        )
        self._sequence += 1
        self._events = []
        return batch

    def _train(self, rank: SimulatedRank) -> list[SpanBlock]:
        if time.monotonic() - rank.stepped < STEP_SECONDS:
            return []
        rank.stepped = time.monotonic()
        if rank.stop_at is not None and rank.step >= rank.stop_at[1]:
            self._acknowledge(rank, rank.stop_at[0])
            return []
        start_ns = time.monotonic_ns() - int(STEP_SECONDS * 1e9)
        rows = b""
        for op, duration in ((Op.FORWARD, 0.5), (Op.BACKWARD, 0.4), (Op.STEP, 1.0)):
            microbatch = NONE_32 if op is Op.STEP else 0
            length = int(duration * STEP_SECONDS * 1e9)
            rows += spans.RECORD.pack(
                *(rank.index, op, 0, NONE_16, 0, rank.step, microbatch, NONE_32, 0, 0, 0),
                *(start_ns, length),
            )
            rank.index += 1
            start_ns += 0 if op is Op.BACKWARD else length
        rank.step += 1
        job, generation = rank.start.job, rank.start.generation
        self._events.append(
            RankState(
                time_ns=time.time_ns(),
                job=job,
                generation=generation,
                rank=rank.rank,
                clock_offset_ns=time.time_ns() - time.monotonic_ns(),
                view=view(rank.step),
                process_state="S",
            )
        )
        offset_ns = time.time_ns() - time.monotonic_ns()
        return [SpanBlock(job, generation, rank.rank, spans.to_columns(rows), offset_ns)]

    def _acknowledge(self, rank: SimulatedRank, command_id: int) -> None:
        self._events.append(
            RankAcknowledged(
                time_ns=time.time_ns(),
                job=rank.start.job,
                generation=rank.start.generation,
                rank=rank.rank,
                command_id=command_id,
                status="done",
                step=rank.step,
            )
        )
        self._exit(rank, exit_code=0, commanded=True)

    def _exit(self, rank: SimulatedRank, **how: object) -> None:
        self.ranks.pop(rank.rank, None)
        self._events.append(
            RankExited(
                time_ns=time.time_ns(),
                job=rank.start.job,
                generation=rank.start.generation,
                rank=rank.rank,
                pid=rank.pid,
                **how,  # type: ignore[arg-type]
            )
        )

    # --- commands --------------------------------------------------------------------------

    def _listen(self) -> None:
        with httpx.Client(headers=self._bearer(), verify=False) as client:
            while not self._gone.wait(0.05):
                try:
                    self._follow(client)
                except httpx.TransportError:
                    continue

    def _follow(self, client: httpx.Client) -> None:
        path = f"{self.url}/api/v1/agents/{self.agent_id}/commands"
        with client.stream("GET", path) as answer:
            if answer.status_code != 200:
                return
            self._stream = answer.extensions["network_stream"].get_extra_info("socket")
            for line in answer.iter_lines():
                if self._gone.is_set():
                    return
                command = commands.decode_line(line)
                if not isinstance(command, commands.Ping):
                    with self._lock:
                        self._carry_out(command)

    def _carry_out(self, command: commands.Command) -> None:
        assert not isinstance(command, commands.Ping)
        if command.command_id not in self._seen:
            self.carried_out.append(command)
            self._seen[command.command_id] = self._do(command)
        result = CommandResult(
            time_ns=time.time_ns(),
            command_id=command.command_id,
            ok=self._seen[command.command_id],
            detail="" if self._seen[command.command_id] else self.start_error,
        )
        self._events.append(result)

    def _do(self, command: commands.Command) -> bool:
        match command:
            case commands.StartRanks():
                if self.start_error:
                    return False
                for each in command.ranks:
                    self._start_rank(command, each)
            case commands.StopGeneration():
                for rank in list(self.ranks.values()):
                    if rank.start.generation <= command.generation:
                        self._exit(rank, signal=9, commanded=True)
            case commands.ControlRanks():
                for rank in self.ranks.values():
                    rank.stop_at = (command.command_id, command.target_step)
        return True

    def _start_rank(
        self,
        command: commands.StartRanks,
        spec: commands.RankSpec,
        pid: int | None = None,
        metadata: Mapping[str, str] = MappingProxyType({}),
        user: int | None = None,
    ) -> None:
        pid = pid or 1000 + 10 * command.generation + spec.rank
        stepped = time.monotonic() + self.startup_seconds
        rank = SimulatedRank(command, spec.rank, pid, step=0, stepped=stepped)
        self.ranks[spec.rank] = rank
        identity = Identity(
            job=command.job,
            generation=command.generation,
            rank=spec.rank,
            local_rank=spec.local_rank,
            world_size=command.topology.world_size,
            topology=command.topology,
            coordinates=command.topology.coordinates(spec.rank),
            pid=pid,
            host="host",
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
            started_ns=time.monotonic_ns(),
            metadata=dict(metadata),
            user=user,
        )
        now_ns = time.time_ns()
        self._events += [
            RankStarted(
                time_ns=now_ns,
                job=command.job,
                generation=command.generation,
                rank=spec.rank,
                pid=pid,
            ),
            RankAttached(time_ns=now_ns, identity=identity),
        ]
        self._attached[spec.rank] = identity


def bearer(url: str, scope: LocalScope) -> dict[str, str]:
    """Return the header with this user's token for a local server."""
    token = find_token(url, scope, os.environ)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def stop_all(nodes: list[SimulatedNode]) -> None:
    for node in nodes:
        node.stop()
    for node in nodes:
        node.join()


def post_job(url: str, dp: int = 2, **fields: object) -> str:
    body = {"name": "toy", "argv": ["true"], "topology": {"dp": dp, "pp": 1, "tp": 1}, **fields}
    headers = bearer(url, "operator")
    answer = httpx.post(f"{url}/api/v1/jobs", json=body, headers=headers, verify=False, timeout=60)
    assert answer.status_code == 201, answer.text
    identifier: str = json.loads(answer.text)["id"]
    return identifier
