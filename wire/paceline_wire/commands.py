"""What the server asks of an agent, over the long-lived command stream.

Commands are idempotent: an agent remembers the ids it has carried out and answers a repeated one
with the same `CommandResult`. The stream is newline-delimited JSON; a `Ping` keeps it alive.
"""

from __future__ import annotations

import msgspec

from paceline_wire.topology import Topology

# In a job's environment: modules, by commas, that the ranks of a restart are to find imported.
PRELOAD = "PACELINE_PRELOAD"
PING_SECONDS = 2.0  # an agent takes a stream that is silent for 5 s for dead


class RankSpec(msgspec.Struct, frozen=True):
    """One process to start. `gpu` is the NVML index on that node, None: no GPU."""

    rank: int
    local_rank: int
    gpu: int | None = None


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Those of generation `generation` that are a node's, and all that starting them takes."""

    command_id: int
    job: str
    generation: int
    topology: Topology
    ranks: list[RankSpec]
    argv: list[str]
    environment: dict[str, str] = {}
    directory: str | None = None
    master_address: str
    master_port: int
    checkpoint_directory: str | None = None


class StartRanks(Ranks, frozen=True, kw_only=True, tag="start_ranks"):
    """Start them. Refused if a newer generation is known."""


class PreloadRanks(Ranks, frozen=True, kw_only=True, tag="preload_ranks"):
    """Import what these ranks will, but start none: a later generation is to have them here."""


class StopGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="stop_generation"):
    """Kill every rank of `job` up to and including `generation`; done when all are dead.

    SIGTERM first, SIGKILL after `grace_seconds` (stopped processes are killed all the same).
    """

    command_id: int
    job: str
    generation: int
    grace_seconds: float = 0.0


class ControlRanks(msgspec.Struct, frozen=True, kw_only=True, tag="control_ranks"):
    """Put a command on the control page of each local rank of (job, generation).

    `kind` is a name of `ring.ControlKind.NAMES`. Ranks agree among themselves on the step:
    `target_step` at the earliest, and later if one of them is already past it.
    """

    command_id: int
    job: str
    generation: int
    kind: str
    target_step: int


class TakeStacks(msgspec.Struct, frozen=True, kw_only=True, tag="take_stacks"):
    """Read the Python stacks of local ranks without stopping them; each is told as `RankStacks`."""

    command_id: int
    job: str
    generation: int
    ranks: list[int]


class TakeDumps(msgspec.Struct, frozen=True, kw_only=True, tag="take_dumps"):
    """Have local ranks write their Flight Recorder dumps; each is told as `RankDump`."""

    command_id: int
    job: str
    generation: int
    ranks: list[int]


class Burst(msgspec.Struct, frozen=True, kw_only=True, tag="burst"):
    """Let collectors collect ten times a second, for at most 30 s; done once they have begun.

    `collectors` are names as in docs/adding-a-collector.md; none: all of them.
    """

    command_id: int
    collectors: list[str] = []
    seconds: float = 10.0


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keeps the stream alive, each PING_SECONDS; `server_ns` is the server's CLOCK_REALTIME.

    `flush_seconds`: send what is not urgent no more often than this; a server of many asks for it.
    """

    server_ns: int
    flush_seconds: float = 0.0


Order = StartRanks | PreloadRanks | StopGeneration | ControlRanks | TakeStacks | TakeDumps | Burst
Command = Order | Ping
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode_line(command: Command) -> bytes:
    return msgspec.json.encode(command) + b"\n"


def decode_line(line: bytes | str) -> Command:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _decoder.decode(line)
