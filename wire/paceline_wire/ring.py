"""The ring file, through which a rank reports to its node's agent without I/O, locks or threads.

One file per rank, in a tmpfs directory. The trainer maps it and writes everything except the
command half of the control page; the agent reads everything. The agent maps nothing: if a ring is
truncated, its read fails, while access to a mapping would crash the agent.

    page 0        identity     magic, layout version, capacity, then msgpack of `Identity`
    page 1        state        512 words, see the `STATE_*` constants; survives SIGKILL
    page 2        control      64 words: a command (agent -> trainer), its acknowledgement back
    pages 3..16   definitions  append-only msgpack records: names of sections, process groups
    pages 17..18  descriptions a word (bytes in use), then append-only msgpack `RankDescription`s
    pages 19..    spans        `capacity` records of `spans.RECORD_BYTES`

Words are 64-bit little-endian and aligned, so each store is atomic on supported machines. A record
is written first and `STATE_HEAD` after it. The reader copies records, reads the head again and
drops records that may have been overwritten meanwhile. An overrun is counted; it never blocks.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline_wire.spans import RECORD_BYTES, SECTION_BASE
from paceline_wire.topology import Coordinates, Topology

MAGIC = b"PACELINE"
LAYOUT_VERSION = 1
PAGE = 4096
STATE_OFFSET = PAGE
CONTROL_OFFSET = 2 * PAGE
DEFINITIONS_OFFSET = 3 * PAGE
DEFINITIONS_BYTES = 14 * PAGE
# Writers of earlier versions used these pages for definitions, and readers expect nothing else
# among the definitions. Both go on working: a reader ignores whichever list the other end lacks.
DESCRIPTIONS_OFFSET = DEFINITIONS_OFFSET + DEFINITIONS_BYTES
DESCRIPTIONS_BYTES = 2 * PAGE
SPANS_OFFSET = DESCRIPTIONS_OFFSET + DESCRIPTIONS_BYTES
DEFAULT_CAPACITY = 1 << 15  # 2 MiB; several seconds of a busy rank
MINIMUM_CAPACITY = 64
MAXIMUM_CAPACITY = 1 << 20  # 64 MiB
SUFFIX = ".ring"

# State page, in words.
STATE_HEAD = 0  # records written since creation
STATE_STEP = 1
STATE_STEP_STARTED_NS = 2
STATE_MICROBATCH = 3  # microbatch + 1; 0: none
STATE_STATUS = 4  # a `Status`
STATE_DEFINITIONS = 5  # bytes of the definitions area in use
STATE_LOST_DEFINITIONS = 6
STATE_LOSS_STEP = 7  # step + 1 of the values below; 0: none given
STATE_LOSS = 8  # float64
STATE_GRADIENT_NORM = 9  # float64, NaN: not given
STATE_DEPTH = 10  # operations in flight, outermost first
STATE_EVALUATION_STEP = 11  # step + 1 of the value below; 0: none given
STATE_EVALUATION_LOSS = 12  # float64
STATE_ABILITIES = 13  # bits of `Ability`
STATE_SAVED_STEP = 14  # steps completed in the newest committed checkpoint, + 1; 0: none reported
STATE_FAILED_SAVES = 15  # number of checkpoints that failed
STATE_FRAMES = 16  # FRAMES x (op, start_ns, group << 32 | peer, sequence)
FRAMES = 8
FRAME_WORDS = 4
STATE_GROUPS = 48  # GROUPS x (sequence entered, sequence left, entered_ns, bytes << 16 | op)
GROUPS = 64
GROUP_WORDS = 4
GROUP_BYTES_SHIFT = 16
# PEERS x (peer + 1, send entered, send left, recv entered, recv left, entered_ns)
STATE_PEERS = 304
PEERS = 32
PEER_WORDS = 6
STATE_SAVE_FAILURE = 496  # UTF-8, zero-padded: why the last checkpoint failed
SAVE_FAILURE_BYTES = 128

# Control page, in words. The command id is written last, and read first.
CONTROL_COMMAND = 0  # id of the newest command; 0: none yet
CONTROL_KIND = 1  # a `ControlKind`
CONTROL_TARGET_STEP = 2
ACK_COMMAND = 8  # written last
ACK_STATUS = 9  # an `AckStatus`
ACK_STEP = 10

# Any user may put files into a ring directory: do not follow links, do not block on a FIFO.
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HEADER = struct.Struct("<8sIIQI")  # magic, layout version, reserved, capacity, identity length


class Status:
    """Values of STATE_STATUS. STOPPING: a signal arrived; the script may save before it ends.

    LOADING: the process runs, and has not called `init_process_group`; its launcher reserved the
    ring. JOINING: it is in the call.
    """

    STARTING, RUNNING, CHECKPOINTING, EVALUATING, FINISHED, FAILED, STOPPING = range(7)
    LOADING, JOINING = 7, 8
    NAMES = (
        *("starting", "running", "checkpointing", "evaluating"),
        *("finished", "failed", "stopping", "loading", "joining"),
    )


class Ability:
    """Bits of STATE_ABILITIES: the commands that the script declared to execute."""

    CHECKPOINT = 1
    STOP = 2


class ControlKind:
    """Values of CONTROL_KIND. CANCEL: the previous command must no longer be executed."""

    CHECKPOINT, CHECKPOINT_AND_STOP, PROFILE, STOP, CANCEL = range(1, 6)
    NAMES = (None, "checkpoint", "checkpoint_and_stop", "profile", "stop", "cancel")


class AckStatus:
    """Values of ACK_STATUS. SEEN: the rank has read the command; DONE and FAILED are final."""

    SEEN, DONE, FAILED = range(1, 4)
    NAMES = (None, "seen", "done", "failed")


class RingError(Exception):
    """A ring file that cannot be used: another format or version, truncated or corrupt."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The rank and process that write this ring. Times are nanoseconds."""

    job: str
    generation: int
    rank: int
    local_rank: int
    world_size: int
    topology: Topology
    coordinates: Coordinates
    pid: int
    host: str
    clock_offset_ns: int  # CLOCK_REALTIME - CLOCK_MONOTONIC when the ring was created
    started_ns: int  # CLOCK_MONOTONIC
    gpu_uuid: str | None = None
    metadata: dict[str, str] = {}  # framework versions, schedule, whether kernels are emulated
    is_reserved: bool = False  # by the launcher, for a rank that has recorded nothing yet
    # of the thread that records, in the rank's own namespace; None: unknown
    native_thread_id: int | None = None
    user: int | None = None  # uid of the file's owner, as the agent reports it; None in the ring


class SectionDefinition(msgspec.Struct, frozen=True, tag="section"):
    """The name of op SECTION_BASE + id."""

    id: int
    name: str


class GroupDefinition(msgspec.Struct, frozen=True, tag="group"):
    """A process group. `ranks` are global."""

    id: int
    name: str
    ranks: list[int]
    axis: str | None = None  # an `Axis` or "world"; None: unknown


class RankDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a rank and its job that were found after its ring was created.

    Later descriptions take precedence.
    """

    source: str  # what they were read from, such as "DeviceMesh" or "Megatron parallel state"
    topology: Topology | None = None  # only sizes: the server finds the layout
    coordinates: Coordinates | None = None
    metadata: dict[str, str] = {}  # as in `Identity`


Definition = SectionDefinition | GroupDefinition
_LIMITS = {
    **dict.fromkeys(("generation", "rank", "pid", "native_thread_id"), 1 << 31),
    "started_ns": 1 << 63,
}
_identities = msgspec.msgpack.Decoder(Identity)
_definitions: msgspec.msgpack.Decoder[Definition] = msgspec.msgpack.Decoder(Definition)
_descriptions = msgspec.msgpack.Decoder(RankDescription)
_Record = TypeVar("_Record")


class Frame(msgspec.Struct, frozen=True, gc=False):
    """An operation in flight. `sequence` 0: not a communication. Clock: CLOCK_MONOTONIC."""

    op: int
    start_ns: int
    group: int
    peer: int | None
    sequence: int


class GroupProgress(msgspec.Struct, frozen=True, gc=False):
    """The last collective of a group that this rank entered and left (sequence numbers from 1)."""

    group: int
    entered: int
    left: int
    entered_ns: int
    op: int
    bytes: int = 0  # payload of the last collective entered; 0: unknown


class PeerProgress(msgspec.Struct, frozen=True, gc=False):
    """The last transfers to and from one peer that this rank entered and left (sequence numbers
    from 1)."""

    peer: int
    send_entered: int
    send_left: int
    recv_entered: int
    recv_left: int
    entered_ns: int


class StateView(msgspec.Struct, frozen=True, gc=False):
    """The state page at one moment. Times: CLOCK_MONOTONIC. Unknown is None."""

    head: int
    step: int
    step_started_ns: int
    microbatch: int | None
    status: str
    loss_step: int | None
    loss: float | None
    gradient_norm: float | None
    evaluation_step: int | None
    evaluation_loss: float | None
    frames: list[Frame]
    groups: list[GroupProgress]
    peers: list[PeerProgress]
    can_checkpoint: bool = False  # whether the script declared that it saves on command
    can_stop: bool = False
    saved_step: int | None = None  # steps completed in the newest committed checkpoint
    failed_saves: int = 0
    save_failure: str | None = None  # reason of the last failed checkpoint


class Control(msgspec.Struct, frozen=True):
    """A command as the trainer reads it at a step boundary."""

    command_id: int
    kind: int
    target_step: int


class Acknowledgement(msgspec.Struct, frozen=True):
    """The trainer's response to a command; `status` is an `AckStatus`."""

    command_id: int
    status: int
    step: int


class RingFile:
    """The writer's end of a ring: the mapped file and its pages."""

    def __init__(self, path: Path, mapping: mmap.mmap, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self.map = mapping
        view = memoryview(mapping)
        self.state = view[STATE_OFFSET:CONTROL_OFFSET].cast("Q")
        self.state_floats = view[STATE_OFFSET:CONTROL_OFFSET].cast("d")
        self.control = view[CONTROL_OFFSET : CONTROL_OFFSET + 512].cast("Q")
        self.definitions = view[DEFINITIONS_OFFSET:DESCRIPTIONS_OFFSET]
        self.descriptions = view[DESCRIPTIONS_OFFSET:SPANS_OFFSET]
        self.description_words = self.descriptions.cast("Q")
        self.spans = view[SPANS_OFFSET : SPANS_OFFSET + capacity * RECORD_BYTES]
        self._views = (
            *(self.state, self.state_floats, self.control, self.definitions),
            *(self.description_words, self.descriptions, self.spans),
        )
        self._view = view

    def close(self) -> None:
        """Unmap the file."""
        for view in self._views:
            view.release()
        self._view.release()
        self.map.close()


def create(path: Path, identity: Identity, capacity: int = DEFAULT_CAPACITY) -> RingFile:
    """Create `path` (it appears complete, by rename) and map it for the writer.

    Raises:
        ValueError: the capacity is not a power of two or too large, or the identity is too long.
        OSError: the directory cannot be written.
    """
    if not is_capacity(capacity):
        raise ValueError(
            f"capacity must be a power of two in {MINIMUM_CAPACITY}..{MAXIMUM_CAPACITY}: {capacity}"
        )
    header = _header(identity, capacity)
    unique = os.urandom(8).hex()  # so that other users cannot predict the name
    temporary = path.with_name(f".{path.name}.{unique}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        size = _allocate(descriptor, path.parent, capacity)
        mapping = mmap.mmap(descriptor, size)
        mapping[: len(header)] = header
        try:
            os.rename(temporary, path)
        except PermissionError:  # another user's file has this name
            path = path.with_name(f"{path.stem}.{unique}{path.suffix}")
            os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)
    return RingFile(path, mapping, capacity)


def reserve(path: Path, identity: Identity) -> None:
    """Create the ring of a rank that has not created it, with status LOADING.

    The rank replaces it by its own. It never replaces one that the rank creates at the same time.

    Raises:
        FileExistsError: the rank has a ring.
        ValueError: the identity is too long.
        OSError: the directory cannot be written.
    """
    header = _header(identity, MINIMUM_CAPACITY)
    descriptor = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        _allocate(descriptor, path.parent, MINIMUM_CAPACITY)
        os.pwrite(descriptor, header, 0)
        os.pwrite(descriptor, Status.LOADING.to_bytes(8, "little"), STATE_OFFSET + 8 * STATE_STATUS)
        # Readers refuse a file with two names, which a link to a named file has for a moment. For a
        # file without a name, Python follows the symbolic link only if a directory is given.
        names = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(descriptor), path, src_dir_fd=names)
        finally:
            os.close(names)
    finally:
        os.close(descriptor)


def set_status(path: Path, status: int) -> None:
    """Set the status of the ring of a process that has ended, such as one that was only reserved.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, status.to_bytes(8, "little"), STATE_OFFSET + 8 * STATE_STATUS)
    finally:
        os.close(descriptor)


def _header(identity: Identity, capacity: int) -> bytes:
    encoded = msgspec.msgpack.encode(identity)
    if _HEADER.size + len(encoded) > PAGE:
        raise ValueError(f"identity takes {len(encoded)} bytes, more than one page holds")
    return _HEADER.pack(MAGIC, LAYOUT_VERSION, 0, capacity, len(encoded)) + encoded


def _allocate(descriptor: int, directory: Path, capacity: int) -> int:
    """Give the file of a new ring its permissions and its size, which is returned."""
    # Set-group-ID: the agent runs as another user and reads rings through this group.
    if os.stat(directory).st_mode & stat.S_ISGID:
        os.fchmod(descriptor, 0o660)
    size = SPANS_OFFSET + capacity * RECORD_BYTES
    os.posix_fallocate(descriptor, 0, size)  # a full tmpfs fails here, not with SIGBUS later
    return size


def is_capacity(capacity: int) -> bool:
    """Return whether a ring may hold this number of records."""
    is_within = MINIMUM_CAPACITY <= capacity <= MAXIMUM_CAPACITY
    return is_within and not capacity & (capacity - 1)


def define(ring: RingFile, definition: Definition) -> bool:
    """Append a definition (writer's end). Return False, and count it, if the area is full."""
    encoded = msgspec.msgpack.encode(definition)
    used = ring.state[STATE_DEFINITIONS]
    end = used + 4 + len(encoded)
    if end > DEFINITIONS_BYTES:
        ring.state[STATE_LOST_DEFINITIONS] += 1
        return False
    ring.definitions[used:end] = len(encoded).to_bytes(4, "little") + encoded
    ring.state[STATE_DEFINITIONS] = end
    return True


def describe(ring: RingFile, description: RankDescription) -> bool:
    """Append a description (writer's end). Return False if the area is full."""
    encoded = msgspec.msgpack.encode(description)
    used = ring.description_words[0] or 8
    end = used + 4 + len(encoded)
    if end > DESCRIPTIONS_BYTES:
        return False
    ring.descriptions[used:end] = len(encoded).to_bytes(4, "little") + encoded
    ring.description_words[0] = end
    return True


class _Words:
    """The words of a page, read and written directly in the file. Raises RingError past its end."""

    def __init__(self, descriptor: int, path: Path, offset: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self._offset = offset

    def __getitem__(self, word: int) -> int:
        return int.from_bytes(self.read(word, 1), "little")

    def __setitem__(self, word: int, value: int) -> None:
        content = value.to_bytes(8, "little")
        os.pwrite(self._descriptor, content, self._offset + 8 * word)

    def read(self, first: int, count: int) -> bytes:
        """Return consecutive words."""
        return _read(self._descriptor, self._path, self._offset + 8 * first, 8 * count)


class RingReader:
    """The agent's end of a ring. One reader per ring; it keeps its read position."""

    def __init__(self, path: Path) -> None:
        """Open a ring. Raises RingError if it is not a complete ring of this layout version."""
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except OSError as error:
            raise RingError(f"{path}: {error.strerror}") from error
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        try:
            self.status = os.fstat(descriptor)
            self.capacity, self.identity = _read_header(descriptor, path, self.status)
        except RingError:
            self.close()
            raise
        self.path = path
        self.state = _Words(descriptor, path, STATE_OFFSET)
        self.control = _Words(descriptor, path, CONTROL_OFFSET)
        self.position = 0  # index of the next record to read
        self.lost = 0  # records overwritten before they were read, or torn
        self._descriptor = descriptor
        self._defined = 0
        self._described = 8

    def close(self) -> None:
        """Close the file."""
        self._finalizer()

    def read(self, limit: int = 1 << 14) -> bytes:
        """Return at most `limit` new records, row-major, oldest first; add overruns to `lost`.

        Raises RingError if the head went backwards or is not plausible (a corrupt state page).
        """
        head = self.state[STATE_HEAD]
        if head < self.position or head >> 60:
            raise RingError(f"{self.path}: head {head} behind position {self.position}")
        # One slot of margin, because the record at `head` may be partly written over the oldest
        # one.
        oldest = max(0, head - self.capacity + 1)
        if self.position < oldest:
            self.lost += oldest - self.position
            self.position = oldest
        count = min(head - self.position, limit)
        if not count:
            return b""
        first = self.position & (self.capacity - 1)
        split = min(count, self.capacity - first)
        records = self._read(SPANS_OFFSET + first * RECORD_BYTES, split * RECORD_BYTES)
        if split < count:
            records += self._read(SPANS_OFFSET, (count - split) * RECORD_BYTES)
        overwritten = max(0, self.state[STATE_HEAD] - self.capacity + 1 - self.position)
        self.position += count
        if overwritten:
            dropped = min(overwritten, count)
            self.lost += dropped
            records = records[dropped * RECORD_BYTES :]
        return records

    def new_definitions(self) -> list[Definition]:
        """Return the definitions since the last call. Raises RingError on a corrupt area."""
        used = self.state[STATE_DEFINITIONS]
        if used > SPANS_OFFSET - DEFINITIONS_OFFSET:
            raise RingError(f"{self.path}: definitions claim {used} bytes")
        if used <= self._defined:
            return []
        definitions = self._decoded(DEFINITIONS_OFFSET, self._defined, used, _definitions)
        self._defined = used
        return definitions

    def new_descriptions(self) -> list[RankDescription]:
        """Return the descriptions since the last call. Raises RingError on a corrupt area."""
        if self.state[STATE_DEFINITIONS] > DEFINITIONS_BYTES:
            return []  # a writer of an earlier version, with definitions here
        used = int.from_bytes(self._read(DESCRIPTIONS_OFFSET, 8), "little")
        if used > DESCRIPTIONS_BYTES:
            raise RingError(f"{self.path}: descriptions claim {used} bytes")
        if used <= self._described:
            return []
        descriptions = self._decoded(DESCRIPTIONS_OFFSET, self._described, used, _descriptions)
        self._described = used
        return descriptions

    def _decoded(
        self, area: int, start: int, end: int, decoder: msgspec.msgpack.Decoder[_Record]
    ) -> list[_Record]:
        """Return the records of an append-only area between two of its offsets."""
        content = self._read(area + start, end - start)
        records, at = [], 0
        while at < len(content):
            begin = at + 4
            at = begin + int.from_bytes(content[at:begin], "little")
            if at > len(content):
                raise RingError(f"{self.path}: a record overruns its area")
            try:
                records.append(decoder.decode(content[begin:at]))
            except (msgspec.DecodeError, ValueError) as error:
                raise RingError(f"{self.path}: corrupt record: {error}") from error
        return records

    def view(self) -> StateView:
        """Decode the current state page."""
        page = memoryview(self.state.read(0, PAGE // 8))
        words = page.cast("Q").tolist()
        floats = page.cast("d")
        frames = []
        for depth in range(min(words[STATE_DEPTH], FRAMES)):
            op, start_ns, place, sequence = words[STATE_FRAMES + depth * FRAME_WORDS :][
                :FRAME_WORDS
            ]
            peer = place & 0xFFFF_FFFF
            frames.append(
                Frame(op, start_ns, place >> 32, None if peer == 0xFFFF_FFFF else peer, sequence)
            )
        groups = []
        for group in range(GROUPS):
            entered, left, entered_ns, operation = words[STATE_GROUPS + group * GROUP_WORDS :][
                :GROUP_WORDS
            ]
            if entered:
                op, size = operation & 0xFFFF, operation >> GROUP_BYTES_SHIFT
                groups.append(GroupProgress(group, entered, left, entered_ns, op, size))
        peers = []
        for slot in range(PEERS):
            peer_plus_one, *rest = words[STATE_PEERS + slot * PEER_WORDS :][:PEER_WORDS]
            if peer_plus_one:
                peers.append(PeerProgress(peer_plus_one - 1, *rest))
        has_loss = bool(words[STATE_LOSS_STEP])
        norm = floats[STATE_GRADIENT_NORM]
        status = words[STATE_STATUS]
        evaluation_step = words[STATE_EVALUATION_STEP]
        return StateView(
            head=words[STATE_HEAD],
            step=words[STATE_STEP],
            step_started_ns=words[STATE_STEP_STARTED_NS],
            microbatch=words[STATE_MICROBATCH] - 1 if words[STATE_MICROBATCH] else None,
            status=Status.NAMES[status] if status < len(Status.NAMES) else "unknown",
            loss_step=words[STATE_LOSS_STEP] - 1 if has_loss else None,
            loss=floats[STATE_LOSS] if has_loss else None,
            gradient_norm=norm if has_loss and norm == norm else None,
            evaluation_step=evaluation_step - 1 if evaluation_step else None,
            evaluation_loss=floats[STATE_EVALUATION_LOSS] if evaluation_step else None,
            frames=frames,
            groups=groups,
            peers=peers,
            can_checkpoint=bool(words[STATE_ABILITIES] & Ability.CHECKPOINT),
            can_stop=bool(words[STATE_ABILITIES] & Ability.STOP),
            saved_step=words[STATE_SAVED_STEP] - 1 if words[STATE_SAVED_STEP] else None,
            failed_saves=words[STATE_FAILED_SAVES],
            save_failure=_save_failure(page) if words[STATE_FAILED_SAVES] else None,
        )

    def command(self, command_id: int, kind: int, target_step: int) -> None:
        """Write a command for the trainer, which reads the newest one at its next step boundary."""
        self.control[CONTROL_KIND] = kind
        self.control[CONTROL_TARGET_STEP] = target_step
        self.control[CONTROL_COMMAND] = command_id

    def acknowledgement(self) -> Acknowledgement | None:
        """Return the trainer's last response to a command, or None."""
        command_id = self.control[ACK_COMMAND]
        if not command_id:
            return None
        return Acknowledgement(command_id, self.control[ACK_STATUS], self.control[ACK_STEP])

    def _read(self, offset: int, size: int) -> bytes:
        return _read(self._descriptor, self.path, offset, size)


def _save_failure(page: memoryview) -> str:
    start = 8 * STATE_SAVE_FAILURE
    content = bytes(page[start : start + SAVE_FAILURE_BYTES])
    return content.rstrip(b"\0").decode(errors="replace")


def _read(descriptor: int, path: Path, offset: int, size: int) -> bytes:
    try:
        content = os.pread(descriptor, size, offset)
    except OSError as error:
        raise RingError(f"{path}: {error.strerror}") from error
    if len(content) < size:
        raise RingError(f"{path}: truncated while in use")
    return content


def _read_header(descriptor: int, path: Path, status: os.stat_result) -> tuple[int, Identity]:
    """Return capacity and identity. Raises RingError if the file is not a ring of this layout."""
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise RingError(f"{path}: not a regular file")
    if status.st_nlink > 1:
        raise RingError(f"{path}: has {status.st_nlink} names")
    if size < SPANS_OFFSET:
        raise RingError(f"{path}: {size} bytes is too short for a ring")
    page = _read(descriptor, path, 0, PAGE)
    magic, version, _, capacity, length = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise RingError(f"{path}: not a Paceline ring")
    if version != LAYOUT_VERSION:
        raise RingError(f"{path}: layout {version}, this agent reads {LAYOUT_VERSION}")
    if size != SPANS_OFFSET + capacity * RECORD_BYTES or not is_capacity(capacity):
        raise RingError(f"{path}: {size} bytes do not fit a capacity of {capacity}")
    try:
        identity = _identities.decode(page[_HEADER.size : min(_HEADER.size + length, PAGE)])
        _check_numbers(identity)
    except (msgspec.DecodeError, ValueError) as error:
        raise RingError(f"{path}: corrupt identity page: {error}") from error
    return capacity, identity


def _check_numbers(identity: Identity) -> None:
    """Raise ValueError for numbers that a batch cannot hold: the server would reject it."""
    for name, limit in _LIMITS.items():
        value = getattr(identity, name)
        if value is not None and not 0 <= value < limit:
            raise ValueError(f"{name} of {value} is not in 0..{limit - 1}")


def section_op(definition_id: int) -> int:
    """Return the op of a user's section."""
    return SECTION_BASE + definition_id
