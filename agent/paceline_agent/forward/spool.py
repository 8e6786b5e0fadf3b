"""The spool: batches on disk until the server has committed them.

One file per batch, `BOOT_ID.SEQUENCE.batch`, appearing whole by rename, so that the order of names
is the order of sending, across restarts of the agent too. There is no fsync: a batch survives the
agent's death, SIGKILL included; after a loss of power the newest may be missing or torn, which the
checksum in front tells, and the node's ranks are gone then anyhow. While none waits, a small batch
goes through a file that is kept instead (`spool_slot`).

One boot at a time may overtake: its batches and those of the backlog then leave in turns.

When the limit is reached, the oldest batches lose their spans and state pages first; once none has
any, the oldest lose their samples; then the oldest go wholly, with the events in them. When the
disk fails, batches are kept in memory instead, within a smaller limit and by the same rule, until
it takes them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from paceline_agent.clock import timeline_ns
from paceline_agent.forward.spool_slot import ROOM_BYTES, Slot
from paceline_wire.batch import Batch, BatchError, Event, RankState, decode, encode

log = logging.getLogger(__name__)

SUFFIX = ".batch"
MEMORY_BYTES = 16 << 20
REJECTED_KEPT = 16
_NEWEST_BOOT = "newest-boot"  # the file that outlives the batches
_WRITING = ".writing"
_SLOT = ".slot"
_HEADER = struct.Struct("<4sII")  # magic, crc32, length
_MAGIC = b"PLB1"


class Detail(IntEnum):
    """What a batch holds, the first to be dropped being the greatest."""

    EVENTS = 0
    SAMPLES = 1
    SPANS = 2


@dataclass(slots=True, eq=False)
class Entry:
    """One batch that waits. `payload` is set while the disk does not hold it.

    `in_slot`: no file of this name holds it.
    """

    name: str
    size_bytes: int
    payload: bytes | None = None
    detail: Detail = Detail.SPANS  # what may still be in it; known only once it was looked at
    is_cut: bool = False
    in_slot: bool = False


@dataclass(slots=True)
class SpoolCounts:
    """What was lost since the agent began. `dropped`: batches that lost their detail, or all."""

    dropped: int = 0
    corrupt: int = 0
    rejected: int = 0
    lost_spans: int = 0
    lost_samples: int = 0
    lost_events: int = 0  # state pages apart: the next one says more than a lost one did


class Spool:
    """A bounded queue of packed batches; one writer and one sender in one event loop."""

    def __init__(self, directory: Path, limit_bytes: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.counts = SpoolCounts()
        self.size_bytes = 0
        self.disk_error: str | None = None
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._memory_limit_bytes = min(memory_bytes, limit_bytes)
        self._memory_bytes = 0
        self._backlog: deque[Entry] = deque()
        self._overtaking: deque[Entry] = deque()
        self._overtaker: str | None = None  # the boot whose batches are put into the latter
        self._overtook = False  # the last one that left
        self._leaving: Entry | None = None
        self._newest_boot = ""
        self._slot = Slot(directory / _SLOT)
        self._filled = asyncio.Event()
        self._load()

    def __len__(self) -> int:
        return len(self._backlog) + len(self._overtaking)

    @property
    def backlog(self) -> int:
        return len(self._backlog)

    @property
    def overtaking(self) -> int:
        return len(self._overtaking)

    def begin_boot(self) -> str:
        """A new boot's id. Ids sort in the order of the boots, however the clock was set."""
        after_ns = _began_ns(self._newest_boot)
        self._newest_boot = f"{max(timeline_ns(), after_ns + 1):016x}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # a disk that takes nothing shows with the first batch
            self._write(_NEWEST_BOOT, self._newest_boot.encode())
        return self._newest_boot

    def overtake(self, boot_id: str | None) -> None:
        """Whatever waits is backlog now, and this boot's batches overtake it; None: none do."""
        self._backlog.extend(self._overtaking)
        self._overtaking.clear()
        self._overtaker = boot_id

    def append(self, batch: Batch) -> None:
        """Never fails: what the disk does not take stays in memory."""
        payload = encode(batch)
        entry = Entry(_name(batch), len(payload), detail=_detail(batch))
        if len(self) or not self._pass_through(entry, payload):
            self._store(entry, payload)
        overtakes = batch.boot_id == self._overtaker
        (self._overtaking if overtakes else self._backlog).append(entry)
        self._count(entry, 1)
        if entry.payload is None and self._memory_bytes:
            self._spill()
        self._make_room()
        if entry.payload is None:
            self._disk_works()
        self._filled.set()

    async def head(self) -> Entry:
        """The batch to be sent next, which from now on is left alone; waits for one."""
        while not len(self):
            self._filled.clear()
            await self._filled.wait()
        self._overtook = bool(self._overtaking) and not (self._overtook and self._backlog)
        self._leaving = (self._overtaking if self._overtook else self._backlog)[0]
        return self._leaving

    def read(self, entry: Entry) -> bytes | None:
        """The packed batch, or None: the file was damaged, is counted and gone."""
        if entry.payload is not None:
            return entry.payload
        try:
            content = self._content(entry)
        except OSError as error:
            self._skip(entry, error.strerror or "unreadable")
            return None
        payload = _unframe(content)
        if payload is None:
            self._skip(entry, "its checksum does not match")
        return payload

    def batches_after(self, boot_id: str, sequence: int) -> Iterator[Batch]:
        """Those of this boot and of later ones that still wait, in order."""
        last = f"{boot_id}.{sequence:012d}{SUFFIX}"
        for entry in self._all():
            payload = self.read(entry) if entry.name > last else None
            with contextlib.suppress(BatchError):
                if payload is not None:
                    yield decode(payload)

    def remove(self, entry: Entry) -> None:
        """The server has it."""
        if self._forget(entry):
            self._unlink(entry)

    def reject(self, entry: Entry) -> None:
        """The server will never take it: keep the newest few for a look."""
        self.counts.rejected += 1
        if not self._forget(entry) or entry.payload is not None:
            return
        aside = self._directory / "rejected"
        try:
            aside.mkdir(exist_ok=True)
            if entry.in_slot:
                (aside / entry.name).write_bytes(self._content(entry))
                self._delete(entry)
            else:
                os.rename(self._directory / entry.name, aside / entry.name)
            for old in sorted(aside.iterdir())[:-REJECTED_KEPT]:
                old.unlink(missing_ok=True)
        except OSError:
            self._unlink(entry)

    def _all(self) -> list[Entry]:
        return [*self._backlog, *self._overtaking]

    def _load(self) -> None:
        remembered = ""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            waiting = []
            for found in os.scandir(self._directory):
                if found.name.endswith(SUFFIX):
                    waiting.append(Entry(found.name, found.stat().st_size))
                elif found.name == _WRITING:
                    os.unlink(found.path)
                elif found.name == _NEWEST_BOOT:
                    remembered = Path(found.path).read_text(errors="replace")
            with contextlib.suppress(OSError):  # a disk that is read-only
                waiting += self._in_slot({entry.name for entry in waiting})
            for entry in sorted(waiting, key=lambda entry: entry.name):
                self._backlog.append(entry)
                self._count(entry, 1)
                self._newest_boot = entry.name.rsplit(".", 2)[0]
            self._newest_boot = max(self._newest_boot, remembered, key=_began_ns)
        except OSError as error:
            self._disk_failed(error)
        self._make_room()

    def _in_slot(self, names: set[str]) -> Iterator[Entry]:
        """What an earlier agent left there, unless it was in the middle of moving it to a file."""
        content = self._slot.read() if (self._directory / _SLOT).exists() else b""
        payload = _unframe(content)
        try:
            batch = None if payload is None else decode(payload)
        except BatchError:
            batch = None
        if batch is not None and payload is not None and _name(batch) not in names:
            yield Entry(_name(batch), len(payload), in_slot=True)
        elif content:
            self.counts.corrupt += batch is None
            self._slot.clear()

    def _pass_through(self, entry: Entry, payload: bytes) -> bool:
        """Whether the slot has taken it."""
        if len(payload) > ROOM_BYTES:
            return False
        try:
            self._slot.put(_frame(payload), payload)
        except OSError:
            return False
        entry.in_slot = True
        return True

    def _content(self, entry: Entry) -> bytes:
        """With its frame. Raises OSError."""
        if entry.in_slot:
            return self._slot.read()
        return (self._directory / entry.name).read_bytes()

    def _store(self, entry: Entry, payload: bytes) -> None:
        """To a file, or to memory if that fails."""
        try:
            self._write(entry.name, _frame(payload) + payload)
        except OSError as error:
            entry.payload = payload
            self._disk_failed(error)
            return
        entry.payload = None

    def _write(self, name: str, content: bytes) -> None:
        """All of it or, with an OSError, nothing."""
        temporary = self._directory / _WRITING
        try:
            temporary.write_bytes(content)
            os.rename(temporary, self._directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _spill(self) -> None:
        """Move what memory holds to disk, the oldest first, as far as that takes it."""
        for entry in self._all():
            if entry.payload is not None:
                self._count(entry, -1)
                self._store(entry, entry.payload)
                self._count(entry, 1)
                if entry.payload is not None:
                    return

    def _disk_works(self) -> None:
        """It took the newest batch; while others have no room there, a small one says little."""
        if self.disk_error is not None and not self._memory_bytes:
            log.warning("the spool at %s can be written again", self._directory)
            self.disk_error = None

    def _disk_failed(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if self.disk_error is None:
            log.error(
                "the spool at %s cannot be written (%s): batches are kept in memory; "
                "make room, or give another --spool-directory",
                self._directory,
                reason,
            )
        self.disk_error = reason

    def _make_room(self) -> None:
        """Oldest detail first, then the oldest."""
        for kept in (Detail.SAMPLES, Detail.EVENTS, None):
            if not self._is_full():
                return
            for entry in self._all():
                if not self._is_full():
                    return
                if entry is not self._leaving and (kept is None or entry.detail > kept):
                    was_on_disk = entry.payload is None
                    self._cut(entry, kept)
                    if was_on_disk and self._memory_bytes:
                        self._spill()

    def _is_full(self) -> bool:
        if self.size_bytes > self._limit_bytes:
            return True
        return self._memory_bytes > self._memory_limit_bytes

    def _cut(self, entry: Entry, kept: Detail | None) -> None:
        """Leave of a batch only what is `kept`; None: nothing."""
        payload = self.read(entry)
        if payload is None:
            return
        try:
            batch = decode(payload)
        except BatchError as error:
            self._skip(entry, str(error))
            return
        entry.detail = _detail(batch)  # of one that an earlier agent left, we did not know
        if kept is not None and entry.detail <= kept:
            return
        left = _reduce(batch, kept)
        self._count_losses(entry, batch, left)
        if left is None:
            self.remove(entry)
            return
        bare = encode(left)
        self._count(entry, -1)
        entry.size_bytes, entry.detail, entry.is_cut = len(bare), _detail(left), True
        if entry.payload is not None:
            entry.payload = bare
        else:
            self._store(entry, bare)
            if entry.in_slot or entry.payload is not None:  # no longer there; no room for both
                self._delete(entry)
        self._count(entry, 1)

    def _count_losses(self, entry: Entry, before: Batch, left: Batch | None) -> None:
        counts = self.counts
        counts.dropped += not entry.is_cut
        counts.lost_spans += sum(block.count + block.lost for block in before.spans)
        if left is None or not left.samples:
            counts.lost_samples += len(before.samples)
        if left is None:
            counts.lost_events += len(_lasting(before.events))

    def _count(self, entry: Entry, sign: int) -> None:
        self.size_bytes += sign * entry.size_bytes
        if entry.payload is not None:
            self._memory_bytes += sign * entry.size_bytes

    def _skip(self, entry: Entry, reason: str) -> None:
        self.counts.corrupt += 1
        log.warning("batch %s of the spool is skipped: %s", entry.name, reason)
        self.remove(entry)

    def _forget(self, entry: Entry) -> bool:
        """False if it was dropped meanwhile."""
        for lane in (self._backlog, self._overtaking):
            with contextlib.suppress(ValueError):
                lane.remove(entry)
                self._count(entry, -1)
                return True
        return False

    def _unlink(self, entry: Entry) -> None:
        if entry.payload is None:
            self._delete(entry)

    def _delete(self, entry: Entry) -> None:
        try:
            if entry.in_slot:
                entry.in_slot = False
                self._slot.clear()
            else:
                (self._directory / entry.name).unlink(missing_ok=True)
        except OSError as error:
            self._disk_failed(error)


def _began_ns(boot_id: str) -> int:
    """0 for an id that is none of ours."""
    try:
        return int(boot_id.partition("-")[0], 16)
    except ValueError:
        return 0


def _name(batch: Batch) -> str:
    return f"{batch.boot_id}.{batch.sequence:012d}{SUFFIX}"


def _frame(payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, zlib.crc32(payload), len(payload))


def _unframe(content: bytes) -> bytes | None:
    if len(content) < _HEADER.size:
        return None
    magic, checksum, length = _HEADER.unpack_from(content)
    payload = content[_HEADER.size : _HEADER.size + length]  # the slot has more behind it
    whole = magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum
    return payload if whole else None


def _detail(batch: Batch) -> Detail:
    if batch.spans or len(_lasting(batch.events)) < len(batch.events):
        return Detail.SPANS
    return Detail.SAMPLES if batch.samples or batch.blocks else Detail.EVENTS


def _lasting(events: list[Event]) -> list[Event]:
    """Those that nothing later makes up for."""
    return [event for event in events if not isinstance(event, RankState)]


def _reduce(batch: Batch, kept: Detail | None) -> Batch | None:
    """None if nothing would be left."""
    events = _lasting(batch.events)
    samples = batch.samples if kept == Detail.SAMPLES else []
    if kept is None or not (events or samples):
        return None
    return msgspec.structs.replace(batch, events=events, spans=[], samples=samples)
