"""Commands from the server to an agent, over a long-lived stream.

Commands are idempotent: an agent remembers the ids that it has executed and responds to a repeated
one with the same `CommandResult`. The stream is newline-delimited JSON; a `Ping` keeps it alive.
"""

from __future__ import annotations

import msgspec

from paceline_wire.topology import Topology

# Variable of a job: modules, separated by commas, that are already imported when ranks restart.
PRELOAD = "PACELINE_PRELOAD"
PING_SECONDS = 2.0  # an agent closes a stream that is silent for 5 s


class RankSpec(msgspec.Struct, frozen=True):
    """One process to start. `gpu` is the NVML index on that node, None: no GPU."""

    rank: int
    local_rank: int
    gpu: int | None = None


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one generation on one node, and everything needed to start them."""

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
    saved_step: int | None = None  # newest step that the job is known to have saved


class StartRanks(Ranks, frozen=True, kw_only=True, tag="start_ranks"):
    """Start these ranks. An agent rejects the command if it knows a newer generation of the job."""


class PreloadRanks(Ranks, frozen=True, kw_only=True, tag="preload_ranks"):
    """Import the modules of these ranks without starting any, for a later generation."""


class StopGeneration(msgspec.Struct, frozen=True, kw_only=True, tag="stop_generation"):
    """Kill every rank of `job` up to and including `generation`; done when all are dead.

    SIGTERM first, SIGKILL after `grace_seconds` (which also kills stopped processes). `renew`: the
    next generation follows, so a rank that can leave its generation without its end (ADR 19) does
    so, and waits; one that has not left in time is killed.
    """

    command_id: int
    job: str
    generation: int
    grace_seconds: float = 0.0
    renew: bool = False


class ControlRanks(msgspec.Struct, frozen=True, kw_only=True, tag="control_ranks"):
    """Put a command on the control page of each local rank of (job, generation).

    `kind` is a name of `ring.ControlKind.NAMES`. The ranks agree on the step:
    `target_step` at the earliest, and later if one of them is already past it.
    """

    command_id: int
    job: str
    generation: int
    kind: str
    target_step: int


class TakeStacks(msgspec.Struct, frozen=True, kw_only=True, tag="take_stacks"):
    """Read the Python stacks of local ranks without pausing them; one `RankStackTraces` each."""

    command_id: int
    job: str
    generation: int
    ranks: list[int]


class TakeProfiles(msgspec.Struct, frozen=True, kw_only=True, tag="take_profiles"):
    """Sample the Python stacks of local ranks for some seconds; one `RankProfile` each.

    The ranks are not paused. `workers`: with the processes that multiprocessing started, such as
    those of a data loader.
    """

    command_id: int
    job: str
    generation: int
    ranks: list[int]
    seconds: float
    workers: bool = False


class TakeDumps(msgspec.Struct, frozen=True, kw_only=True, tag="take_dumps"):
    """Have local ranks write their Flight Recorder dumps; one `RankDump` each."""

    command_id: int
    job: str
    generation: int
    ranks: list[int]


class EndRanks(msgspec.Struct, frozen=True, kw_only=True, tag="end_ranks"):
    """Kill ranks that torchrun started, so that it starts them again.

    A rank is killed only if it is a child of torchrun and still the process of that start. So a
    command that arrives late or twice has no effect. `leave`: end torchrun itself on this node with
    SIGTERM, so that the others meet without it.
    """

    command_id: int
    job: str
    generation: int  # as the ranks report it
    started_ns: dict[int, int]  # by rank: CLOCK_MONOTONIC, `Identity.started_ns` of its process
    leave: bool = False


class Burst(msgspec.Struct, frozen=True, kw_only=True, tag="burst"):
    """Run collectors ten times a second, for at most 30 s.

    The result is sent when the burst has started.

    `collectors` are names as in docs/adding-a-collector.md; empty means all.
    """

    command_id: int
    collectors: list[str] = []
    seconds: float = 10.0


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keeps the stream alive; sent every PING_SECONDS. `server_ns` is the server's CLOCK_REALTIME.

    `flush_seconds`: the shortest time between batches, except for urgent events; a server with many
    agents increases it.
    """

    server_ns: int
    flush_seconds: float = 0.0


Order = (
    StartRanks
    | PreloadRanks
    | StopGeneration
    | ControlRanks
    | TakeStacks
    | TakeProfiles
    | TakeDumps
    | EndRanks
    | Burst
)
Command = Order | Ping
_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode_line(command: Command) -> bytes:
    """Return a command as one line of the stream."""
    return msgspec.json.encode(command) + b"\n"


def decode_line(line: bytes | str) -> Command:
    """Decode one line of the stream. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(line)
