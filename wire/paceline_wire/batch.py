"""Batches: the data that an agent sends, packed as msgpack inside one zstd frame.

A batch is identified by (agent_id, boot_id, sequence). A new `boot_id` starts with each agent
process, and when current data overtakes a backlog; an agent's boots sort in the order in which they
started. `sequence` counts from 0, without gaps except where the spool had to drop batches.
Times are nanoseconds of the node's CLOCK_REALTIME unless a field says otherwise.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Literal

import msgspec
import zstandard

from paceline_wire.ring import (
    Definition,
    GroupDefinition,
    Identity,
    RankDescription,
    SectionDefinition,
    StateView,
)
from paceline_wire.spans import RECORD_BYTES
from paceline_wire.stacks import Profile, ThreadStack

VERSION = 2
_READ_VERSIONS = (1, 2)  # version 1 has no blocks of samples
CONTENT_TYPE = "application/x-paceline-batch"
MAXIMUM_COMPRESSED_BYTES = 8 << 20
MAXIMUM_BYTES = 64 << 20
# A small payload must not become millions of objects: real batches hold some 10,000 values. The
# compression ratio is not limited, because one user's rings full of zeros must not cause the
# rejection of a node's batch.
MAXIMUM_SAMPLES = 1 << 17
MAXIMUM_EVENTS = 1 << 16
_LEVEL = 2  # a third of the cost less than level 3, and smaller for batches that are mostly values


class BatchError(Exception):
    """A payload that is not a valid batch. `reason` is a short stable word for the counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Sample(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One value of one metric, with a Prometheus name (base units in the name)."""

    name: str
    labels: dict[str, str]
    value: float
    time_ns: int


Series = tuple[str, dict[str, str]]  # name and labels


class SampleBlock(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Values of many series at one time, for collectors that return the same series in each call.

    `series` is packed once, by `pack_series`. `values` is packed by `pack_values`: one
    little-endian double per series, NaN for a series without a value.
    """

    series: msgspec.Raw
    values: bytes
    time_ns: int

    @property
    def count(self) -> int:
        """The number of values, including absent ones."""
        return len(self.values) // 8

    def samples(self) -> list[Sample]:
        """Return a sample for each value that is not absent. Raises BatchError."""
        try:
            series, values = unpack_series(self.series), unpack_values(self.values)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BatchError("malformed", f"a block's series are malformed: {error}") from error
        except struct.error as error:
            raise BatchError("invalid", f"a block's values are torn: {error}") from error
        if len(values) != len(series):
            raise BatchError("invalid", f"a block of {len(series)} series has {len(values)} values")
        at_ns = self.time_ns
        return [
            Sample(name, labels, value, at_ns)
            for (name, labels), value in zip(series, values, strict=True)
            if value == value  # not NaN
        ]


class SpanBlock(msgspec.Struct, frozen=True, gc=False):
    """Records of one rank's ring, as `spans.to_columns` packs them; starts are CLOCK_MONOTONIC.

    Add `clock_offset_ns` to get the node's CLOCK_REALTIME. `lost` counts records overwritten unread
    since the previous block.
    """

    job: str
    generation: int
    rank: int
    columns: bytes
    clock_offset_ns: int
    lost: int = 0

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.columns) // RECORD_BYTES


class GpuInfo(msgspec.Struct, frozen=True):
    """One GPU of a node. Its string fields are empty until the GPU responds."""

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    trouble: Literal["lost", "hung"] | None = None  # such a GPU can run no rank
    nvlinks: dict[str, int] = {}  # active links by PCI bus id of the other end, or "switch"
    # whether NVML reports its XIDs; otherwise only the kernel log has them
    reports_xids: bool = True


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, tag="agent_hello"):
    """First event of each boot, and again whenever one of its fields changes."""

    time_ns: int
    hostname: str
    version: str
    address: str  # address at which other nodes reach rank 0 on this node
    rendezvous_port: int  # free at `time_ns`; renewed after each use
    slots: int  # ranks this node can run now, without lost or hung GPUs
    gpus: list[GpuInfo] = []
    labels: dict[str, str] = {}


class RankStarted(msgspec.Struct, frozen=True, kw_only=True, tag="rank_started"):
    """The agent started a rank's process."""

    time_ns: int
    job: str
    generation: int
    rank: int
    pid: int


class RankAttached(msgspec.Struct, frozen=True, kw_only=True, tag="rank_attached"):
    """The agent found and opened a rank's ring."""

    time_ns: int
    identity: Identity


class RankDefined(msgspec.Struct, frozen=True, kw_only=True, tag="rank_defined"):
    """A rank defined names of sections or process groups, or described itself further."""

    time_ns: int
    job: str
    generation: int
    rank: int
    definitions: list[SectionDefinition | GroupDefinition]
    descriptions: list[RankDescription] = []


class RankExited(msgspec.Struct, frozen=True, kw_only=True, tag="rank_exited"):
    """A rank ended: `exit_code` if it exited, `signal` if it was killed.

    `log_tail`: its last lines of output. `since_error_ns`: time from the error that it reported to
    its end; 0 if it reported none.
    """

    time_ns: int
    job: str
    generation: int
    rank: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    commanded: bool = False  # ended by a stop_generation, or after a checkpoint_and_stop
    log_tail: str = ""
    drained: bool = False  # stopped by its agent, which was shut down on request
    renewable: bool = False  # the other ranks of its node can stay for the next generation
    launcher_signal: int | None = None  # that asked its launcher to end, which ended the rank
    launcher_gone: bool = False  # its launcher has ended, so that it will not start it again
    since_error_ns: int = 0


class RankState(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="rank_state"):
    """A rank's state page and process as seen at `time_ns` (its page's times: CLOCK_MONOTONIC)."""

    time_ns: int
    job: str
    generation: int
    rank: int
    clock_offset_ns: int
    view: StateView
    process_state: str | None = None  # letter of /proc/PID/stat: R S D T Z; None: gone
    cpu_seconds: float | None = None


class RankAcknowledged(msgspec.Struct, frozen=True, kw_only=True, tag="rank_acknowledged"):
    """A rank's response on its control page; `status` is a name of `ring.AckStatus.NAMES`."""

    time_ns: int
    job: str
    generation: int
    rank: int
    command_id: int
    status: str
    step: int


class RankStackTraces(msgspec.Struct, frozen=True, kw_only=True, tag="rank_stacks"):
    """The Python stacks of a rank's threads; `error` is the reason if they could not be read.

    First the thread that trains, or the main one if that is unknown.
    """

    time_ns: int
    job: str
    generation: int
    rank: int
    pid: int | None = None
    threads: list[ThreadStack] = []
    error: str | None = None


class RankProfile(msgspec.Struct, frozen=True, kw_only=True, tag="rank_profile"):
    """How often each stack of a rank's thread that trains, and of its loader workers, was found.

    `time_ns`: the end of the samples. `error` is the reason if they could not be taken.
    """

    time_ns: int
    job: str
    generation: int
    rank: int
    begun_ns: int = 0  # the start of the samples; 0: an earlier release of the agent
    main: Profile = Profile()
    workers: Profile = Profile()  # main threads of processes that multiprocessing started
    error: str | None = None


class RankDump(msgspec.Struct, frozen=True, kw_only=True, tag="rank_dump"):
    """A rank's Flight Recorder dump, packed by `dumps.pack`; `error`: the reason if there is none.

    `was_asked`: the rank was asked to write a dump and did not, which is evidence in itself.
    """

    time_ns: int
    job: str
    generation: int
    rank: int
    content: bytes = b""
    written_ns: int | None = None
    error: str | None = None
    was_asked: bool = False


class CommandResult(msgspec.Struct, frozen=True, kw_only=True, tag="command_result"):
    """The result of a command; `detail` is the reason if it failed."""

    time_ns: int
    command_id: int
    ok: bool
    detail: str = ""


# At the end of the detail of an XID whose process is no rank of this node. That of a rank ends with
# `[rank 3 of JOB]`; one that names no process, or one that the agent cannot find, has neither.
OF_ANOTHER_PROCESS = "[another process]"


class DeviceEvent(msgspec.Struct, frozen=True, kw_only=True, tag="device_event"):
    """An event of a device that a collector detected: `gpu_lost`, `gpu_hung`, `xid`, ..."""

    time_ns: int
    kind: str
    device: str  # "gpu0", "mlx5_1/1", "eth0"
    detail: str = ""


class CollectorEvent(msgspec.Struct, frozen=True, kw_only=True, tag="collector_event"):
    """A collector changed its own state: `quarantined`, `recovered`, `unavailable`."""

    time_ns: int
    collector: str
    kind: str
    detail: str = ""


Event = (
    AgentHello
    | RankStarted
    | RankAttached
    | RankDefined
    | RankExited
    | RankState
    | RankAcknowledged
    | RankStackTraces
    | RankProfile
    | RankDump
    | CommandResult
    | DeviceEvent
    | CollectorEvent
)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """New data of one node. An empty batch is a heartbeat."""

    version: int = VERSION
    agent_id: str
    boot_id: str
    sequence: int
    packed_ns: int
    events: list[Event] = []
    spans: list[SpanBlock] = []
    samples: list[Sample] = []
    blocks: list[SampleBlock] = []  # more samples; `decode` converts them
    dropped_batches: int = 0  # dropped by the spool since the boot started
    overtakes: bool = False  # older data of the node's ranks still waits on the node


class _Contexts(threading.local):
    """One pair of contexts per thread: creating it costs as much as one use, and threads must not
    share it."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)


_contexts = _Contexts()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)
_series_decoder = msgspec.msgpack.Decoder(list[Series])
_value = attrgetter("value")


def pack_series(series: Sequence[Series]) -> msgspec.Raw:
    """Pack series, for any number of `SampleBlock`s."""
    return msgspec.Raw(_encoder.encode(series))


def unpack_series(packed: msgspec.Raw) -> list[Series]:
    """Unpack series. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    return _series_decoder.decode(packed)


def pack_values(values: Sequence[float]) -> bytes:
    """Pack the values of a `SampleBlock`."""
    return struct.pack(f"<{len(values)}d", *values)


def unpack_values(packed: bytes) -> tuple[float, ...]:
    """Unpack the values of a `SampleBlock`. Raises struct.error."""
    return struct.unpack(f"<{len(packed) // 8}d", packed)


def encode(batch: Batch) -> bytes:
    """Return the payload of a batch."""
    return pack_content(_encoder.encode(batch))


def pack_content(content: bytes) -> bytes:
    """Return `content` in one zstd frame with its size and a checksum."""
    return _contexts.compressor.compress(content)


def decode(payload: bytes) -> Batch:
    """Decode and check one payload.

    It never allocates more than MAXIMUM_BYTES for the content, whatever size the frame declares,
    nor objects beyond MAXIMUM_SAMPLES and MAXIMUM_EVENTS.

    Raises:
        BatchError: its reason is `oversized`, `compression`, `malformed`, `version` or `invalid`.
    """
    if len(payload) > MAXIMUM_COMPRESSED_BYTES:
        raise BatchError("oversized", f"more than {MAXIMUM_COMPRESSED_BYTES} bytes compressed")
    content = _decompress(payload)
    _check_counts(content)
    batch = _decode_content(content)
    if batch.sequence < 0 or not batch.agent_id or not batch.boot_id:
        raise BatchError("invalid", "agent_id and boot_id must be set, sequence at least 0")
    if len(batch.agent_id) > 128 or len(batch.boot_id) > 128:
        raise BatchError("invalid", "agent_id and boot_id hold at most 128 characters")
    for block in batch.spans:
        if len(block.columns) % RECORD_BYTES:
            raise BatchError("invalid", f"a span block of {len(block.columns)} bytes is torn")
    if batch.blocks:
        samples = [*batch.samples, *chain.from_iterable(block.samples() for block in batch.blocks)]
        batch = msgspec.structs.replace(batch, samples=samples, blocks=[])
    if not all(map(math.isfinite, map(_value, batch.samples))):
        raise BatchError("invalid", "a sample is not finite; absent values are left out")
    return batch


def content_bytes(payload: bytes) -> int:
    """Return the size that the frame declares. Raises BatchError."""
    try:
        frame = zstandard.get_frame_parameters(payload)
    except zstandard.ZstdError as error:
        raise BatchError("compression", f"not a zstd frame: {error}") from error
    if not frame.has_checksum or frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise BatchError("compression", "expected a zstd frame with its size and a checksum")
    return frame.content_size


def _decompress(payload: bytes) -> bytes:
    declared = content_bytes(payload)
    if declared > MAXIMUM_BYTES:
        raise BatchError("oversized", f"content of {declared} bytes, limit {MAXIMUM_BYTES}")
    try:  # allocates the declared size
        content = _contexts.decompressor.decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BatchError("compression", f"not a zstd frame: {error}") from error
    if len(content) != declared:
        raise BatchError("compression", f"truncated: {len(content)} of {declared} bytes")
    return content


class _PackedBlock(msgspec.Struct, array_like=True):
    """A `SampleBlock` whose fields are checked before they are decoded."""

    series: msgspec.Raw
    values: bytes


class _PackedBatch(msgspec.Struct):
    """The lists of a `Batch`, not decoded."""

    events: msgspec.Raw = msgspec.Raw(b"\x90")
    spans: msgspec.Raw = msgspec.Raw(b"\x90")
    samples: msgspec.Raw = msgspec.Raw(b"\x90")
    blocks: msgspec.Raw = msgspec.Raw(b"\x90")


_packed_decoder = msgspec.msgpack.Decoder(_PackedBatch)
_packed_blocks_decoder = msgspec.msgpack.Decoder(list[_PackedBlock])


def _check_counts(content: bytes) -> None:
    """Reject a batch with too many objects before they are created. Raises BatchError."""
    try:
        packed = _packed_decoder.decode(content)
        events = _array_length(packed.events) + _array_length(packed.spans)
        samples = _array_length(packed.samples)
        blocks = _array_length(packed.blocks)
        if max(events, blocks) <= MAXIMUM_EVENTS:
            for block in _packed_blocks_decoder.decode(packed.blocks):
                samples += max(_array_length(block.series), len(block.values) // 8)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # malformed or of another version, which `_decode_content` reports
    if max(events, blocks) > MAXIMUM_EVENTS:
        raise BatchError("oversized", f"{max(events, blocks)} entries, limit {MAXIMUM_EVENTS}")
    if samples > MAXIMUM_SAMPLES:
        raise BatchError("oversized", f"{samples} samples, limit {MAXIMUM_SAMPLES}")


def _array_length(packed: msgspec.Raw) -> int:
    """Return the length that a msgpack array declares; 0 for anything else."""
    head = bytes(memoryview(packed)[:5])
    if head and head[0] & 0xF0 == 0x90:
        return head[0] & 0x0F
    if head[:1] == b"\xdc":
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:5], "big") if head[:1] == b"\xdd" else 0


class _Version(msgspec.Struct):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_Version)


def _decode_content(content: bytes) -> Batch:
    try:
        batch = _decoder.decode(content)
        version = batch.version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        version = _version(content)  # another version may have another structure
        if version in _READ_VERSIONS:
            raise BatchError("malformed", f"not a batch: {error}") from error
    if version not in _READ_VERSIONS:
        raise BatchError("version", f"batch version {version}, this server reads up to {VERSION}")
    return batch


def _version(content: bytes) -> int:
    try:
        return _version_decoder.decode(content).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BatchError("malformed", f"not a batch: {error}") from error


__all__ = [
    "AgentHello",
    "Batch",
    "BatchError",
    "CollectorEvent",
    "CommandResult",
    "Definition",
    "DeviceEvent",
    "Event",
    "GpuInfo",
    "RankAcknowledged",
    "RankAttached",
    "RankDefined",
    "RankDump",
    "RankExited",
    "RankProfile",
    "RankStackTraces",
    "RankStarted",
    "RankState",
    "Sample",
    "SampleBlock",
    "Series",
    "SpanBlock",
    "content_bytes",
    "decode",
    "encode",
    "pack_series",
    "pack_values",
    "unpack_series",
    "unpack_values",
]
