"""The spool: batches on disk until the server has committed them.

Each batch is one file, `BOOT_ID.SEQUENCE.batch`, which appears complete by rename. The order of
names is the order of sending, also across restarts of the agent. There is no fsync: a batch
survives the death of the agent, SIGKILL included. After a power loss the newest batches may be
missing or torn, which the checksum in front detects; the node's ranks are gone then anyway. While
no batch waits, a small one goes through a reused file instead (`spool_slot`).

One boot at a time may overtake: its batches and those of the backlog are then sent alternately.

When the limit is reached, the oldest batches lose their spans and state pages first; once none has
any, the oldest lose their samples; then the oldest are dropped with their events. When the disk
fails, batches stay in memory, within a smaller limit and by the same rule, until the disk accepts
them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
_NEWEST_BOOT = "newest-boot"  # a file that remains when all batches are gone
_WRITING = ".writing"
_SLOT = ".slot"
_HEADER = struct.Struct("<4sII")  # magic, crc32, length
_MAGIC = b"PLB1"
_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Detail(IntEnum):
    """The contents of a batch; the highest value is dropped first."""

    EVENTS = 0
    SAMPLES = 1
    SPANS = 2


@dataclass(slots=True, eq=False)
class SpoolEntry:
    """One batch that waits.

    `payload` is set while the batch is only in memory. `in_slot`: it is in the slot, not in a file
    of this name.
    """

    name: str
    size_bytes: int
    payload: bytes | None = None
    detail: Detail = Detail.SPANS  # upper bound, until the batch is decoded
    is_cut: bool = False
    in_slot: bool = False


@dataclass(slots=True)
class SpoolCounts:
    """Losses since the agent started. `dropped`: batches that lost a part or all."""

    dropped: int = 0
    corrupt: int = 0
    rejected: int = 0
    lost_spans: int = 0
    lost_samples: int = 0
    lost_events: int = 0  # without state pages, each of which replaces the previous one


class Spool:
    """A bounded queue of packed batches, for one writer and one sender in one event loop."""

    def __init__(self, directory: Path, limit_bytes: int, memory_bytes: int = MEMORY_BYTES) -> None:
        self.counts = SpoolCounts()
        self.size_bytes = 0
        self.disk_error: str | None = None
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._memory_limit_bytes = min(memory_bytes, limit_bytes)
        self._memory_bytes = 0
        self._backlog: deque[SpoolEntry] = deque()
        self._overtaking: deque[SpoolEntry] = deque()
        self._overtaker: str | None = None  # the boot whose batches overtake
        self._overtook = False  # whether the last batch taken was an overtaking one
        self._sending: SpoolEntry | None = None  # being sent
        self._newest_boot = ""
        self._slot = Slot(directory / _SLOT)
        self._filled = asyncio.Event()
        self._load()

    def __len__(self) -> int:
        return len(self._backlog) + len(self._overtaking)

    @property
    def backlog(self) -> int:
        """The number of waiting batches that do not overtake."""
        return len(self._backlog)

    @property
    def overtaking(self) -> int:
        """The number of waiting batches that overtake."""
        return len(self._overtaking)

    def begin_boot(self) -> str:
        """Return a new boot id. Ids sort in the order of boots, even if the clock was set back."""
        after_ns = _boot_start_ns(self._newest_boot)
        self._newest_boot = f"{max(timeline_ns(), after_ns + 1):016x}-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # a disk error shows with the first batch
            self._write(_NEWEST_BOOT, self._newest_boot.encode())
        return self._newest_boot

    def overtake(self, boot_id: str | None) -> None:
        """Make everything that waits the backlog; batches of this boot overtake it (None: none)."""
        self._backlog.extend(self._overtaking)
        self._overtaking.clear()
        self._overtaker = boot_id

    def append(self, batch: Batch) -> None:
        """Queue a batch. It never fails: a batch that the disk does not accept stays in memory."""
        payload = encode(batch)
        entry = SpoolEntry(_name(batch), len(payload), detail=_detail(batch))
        if len(self) or not self._put_in_slot(entry, payload):
            self._store(entry, payload)
        overtakes = batch.boot_id == self._overtaker
        (self._overtaking if overtakes else self._backlog).append(entry)
        self._count(entry, 1)
        if entry.payload is None and self._memory_bytes:
            self._spill()
        self._make_room()
        if entry.payload is None:
            self._on_disk_success()
        self._filled.set()

    async def head(self) -> SpoolEntry:
        """Wait for a batch and return the next one to send, which is no longer cut or dropped."""
        while not len(self):
            self._filled.clear()
            await self._filled.wait()
        self._overtook = bool(self._overtaking) and not (self._overtook and self._backlog)
        self._sending = (self._overtaking if self._overtook else self._backlog)[0]
        return self._sending

    def read(self, entry: SpoolEntry) -> bytes | None:
        """Return the packed batch; None if its file was damaged, which is counted and removed.

        Raises:
            OSError: it cannot be read now, because the process lacks file descriptors or memory.
        """
        if entry.payload is not None:
            return entry.payload
        try:
            content = self._content(entry)
        except OSError as error:
            if error.errno in _TEMPORARY:
                raise
            self._skip(entry, error.strerror or "unreadable")
            return None
        payload = _unframe(content)
        if payload is None:
            self._skip(entry, "its checksum does not match")
        return payload

    def batches_after(self, boot_id: str, sequence: int) -> Iterator[Batch]:
        """Yield the waiting batches after this one, from its boot and later boots, in order."""
        last = f"{boot_id}.{sequence:012d}{SUFFIX}"
        for entry in self._all():
            with contextlib.suppress(BatchError, OSError):
                payload = self.read(entry) if entry.name > last else None
                if payload is not None:
                    yield decode(payload)

    def remove(self, entry: SpoolEntry) -> None:
        """Remove a batch that the server has stored."""
        if self._forget(entry):
            self._unlink(entry)

    def reject(self, entry: SpoolEntry) -> None:
        """Set aside a batch that the server rejected; the newest few are kept for inspection."""
        self.counts.rejected += 1
        if not self._forget(entry) or entry.payload is not None:
            return
        rejected = self._directory / "rejected"
        try:
            rejected.mkdir(exist_ok=True)
            if entry.in_slot:
                (rejected / entry.name).write_bytes(self._content(entry))
                self._delete(entry)
            else:
                os.rename(self._directory / entry.name, rejected / entry.name)
            for old in sorted(rejected.iterdir())[:-REJECTED_KEPT]:
                old.unlink(missing_ok=True)
        except OSError:
            self._unlink(entry)

    def _all(self) -> list[SpoolEntry]:
        return [*self._backlog, *self._overtaking]

    def _load(self) -> None:
        saved_boot = ""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # it belongs to someone else
                self._directory.chmod(self._directory.stat().st_mode & ~0o007)
            waiting = []
            for file in os.scandir(self._directory):
                with contextlib.suppress(OSError):  # one unreadable file, or a read-only disk
                    if file.name.endswith(SUFFIX):
                        waiting.append(SpoolEntry(file.name, file.stat().st_size))
                    elif file.name == _WRITING:
                        os.unlink(file.path)
                    elif file.name == _NEWEST_BOOT:
                        saved_boot = Path(file.path).read_text(errors="replace")
            with contextlib.suppress(OSError):  # the disk may be read-only
                waiting += self._load_slot({entry.name for entry in waiting})
            for entry in sorted(waiting, key=lambda entry: entry.name):
                self._backlog.append(entry)
                self._count(entry, 1)
                self._newest_boot = entry.name.rsplit(".", 2)[0]
            self._newest_boot = max(self._newest_boot, saved_boot, key=_boot_start_ns)
        except OSError as error:
            self._on_disk_error(error)
        self._make_room()

    def _load_slot(self, names: set[str]) -> Iterator[SpoolEntry]:
        """Yield the batch that an earlier agent left in the slot, unless it has a file too."""
        content = self._slot.read() if (self._directory / _SLOT).exists() else b""
        payload = _unframe(content)
        try:
            batch = None if payload is None else decode(payload)
        except BatchError:
            batch = None
        if batch is not None and payload is not None and _name(batch) not in names:
            yield SpoolEntry(_name(batch), len(payload), in_slot=True)
        elif content:
            self.counts.corrupt += batch is None
            self._slot.clear()

    def _put_in_slot(self, entry: SpoolEntry, payload: bytes) -> bool:
        """Try to put a batch into the slot. Return whether that worked."""
        if len(payload) > ROOM_BYTES:
            return False
        try:
            self._slot.put(_frame(payload), payload)
        except OSError:
            return False
        entry.in_slot = True
        return True

    def _content(self, entry: SpoolEntry) -> bytes:
        """Return a batch with its frame. Raises OSError."""
        if entry.in_slot:
            return self._slot.read()
        return (self._directory / entry.name).read_bytes()

    def _store(self, entry: SpoolEntry, payload: bytes) -> None:
        """Write a batch to its file, or keep it in memory if that fails."""
        try:
            self._write(entry.name, _frame(payload) + payload)
        except OSError as error:
            entry.payload = payload
            self._on_disk_error(error)
            return
        entry.payload = None

    def _write(self, name: str, content: bytes) -> None:
        """Write a file completely; on an OSError it does not appear."""
        temporary = self._directory / _WRITING
        try:
            temporary.write_bytes(content)
            os.rename(temporary, self._directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _spill(self) -> None:
        """Move batches from memory to disk, the oldest first, until the disk fails."""
        for entry in self._all():
            if entry.payload is not None:
                self._count(entry, -1)
                self._store(entry, entry.payload)
                self._count(entry, 1)
                if entry.payload is not None:
                    return

    def _on_disk_success(self) -> None:
        """Clear the disk error once memory is empty.

        A small batch may fit while larger ones do not.
        """
        if self.disk_error is not None and not self._memory_bytes:
            log.warning("the spool at %s can be written again", self._directory)
            self.disk_error = None

    def _on_disk_error(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if self.disk_error is None:
            log.error(
                "the spool at %s cannot be written (%s): batches are kept in memory; "
                "free disk space, or set another --spool-directory",
                self._directory,
                reason,
            )
        self.disk_error = reason

    def _make_room(self) -> None:
        """Reduce batches until the spool fits: spans first, then samples, then whole batches."""
        for remaining in (Detail.SAMPLES, Detail.EVENTS, None):
            if not self._is_full():
                return
            for entry in self._all():
                if not self._is_full():
                    return
                if entry is not self._sending and (remaining is None or entry.detail > remaining):
                    was_on_disk = entry.payload is None
                    self._cut(entry, remaining)
                    if was_on_disk and self._memory_bytes:
                        self._spill()

    def _is_full(self) -> bool:
        if self.size_bytes > self._limit_bytes:
            return True
        return self._memory_bytes > self._memory_limit_bytes

    def _cut(self, entry: SpoolEntry, remaining: Detail | None) -> None:
        """Reduce a batch to what remains; None drops it."""
        try:
            payload = self.read(entry)
        except OSError:
            return
        if payload is None:
            return
        try:
            batch = decode(payload)
        except BatchError as error:
            self._skip(entry, str(error))
            return
        entry.detail = _detail(batch)  # unknown so far if an earlier agent left it
        if remaining is not None and entry.detail <= remaining:
            return
        reduced = _reduce(batch, remaining)
        self._count_losses(entry, batch, reduced)
        if reduced is None:
            self.remove(entry)
            return
        encoded = encode(reduced)
        self._count(entry, -1)
        entry.size_bytes, entry.detail, entry.is_cut = len(encoded), _detail(reduced), True
        if entry.payload is not None:
            entry.payload = encoded
        else:
            self._store(entry, encoded)
            if entry.in_slot or entry.payload is not None:  # the old file is obsolete
                self._delete(entry)
        self._count(entry, 1)

    def _count_losses(self, entry: SpoolEntry, before: Batch, after: Batch | None) -> None:
        counts = self.counts
        counts.dropped += not entry.is_cut
        counts.lost_spans += sum(block.count + block.lost for block in before.spans)
        if after is None or not after.samples:
            counts.lost_samples += len(before.samples)
        if after is None:
            counts.lost_events += len(_without_state_pages(before.events))

    def _count(self, entry: SpoolEntry, sign: int) -> None:
        self.size_bytes += sign * entry.size_bytes
        if entry.payload is not None:
            self._memory_bytes += sign * entry.size_bytes

    def _skip(self, entry: SpoolEntry, reason: str) -> None:
        self.counts.corrupt += 1
        log.warning("spooled batch %s is skipped: %s", entry.name, reason)
        self.remove(entry)

    def _forget(self, entry: SpoolEntry) -> bool:
        """Remove an entry from its queue. Return False if it was dropped meanwhile."""
        for entries in (self._backlog, self._overtaking):
            with contextlib.suppress(ValueError):
                entries.remove(entry)
                self._count(entry, -1)
                return True
        return False

    def _unlink(self, entry: SpoolEntry) -> None:
        if entry.payload is None:
            self._delete(entry)

    def _delete(self, entry: SpoolEntry) -> None:
        try:
            if entry.in_slot:
                entry.in_slot = False
                self._slot.clear()
            else:
                (self._directory / entry.name).unlink(missing_ok=True)
        except OSError as error:
            self._on_disk_error(error)


def _boot_start_ns(boot_id: str) -> int:
    """Return the start time in a boot id; 0 if it is malformed."""
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
    payload = content[_HEADER.size : _HEADER.size + length]  # a slot may have older bytes behind it
    is_intact = magic == _MAGIC and len(payload) == length and zlib.crc32(payload) == checksum
    return payload if is_intact else None


def _detail(batch: Batch) -> Detail:
    if batch.spans or len(_without_state_pages(batch.events)) < len(batch.events):
        return Detail.SPANS
    return Detail.SAMPLES if batch.samples or batch.blocks else Detail.EVENTS


def _without_state_pages(events: list[Event]) -> list[Event]:
    """Return the events that no later event replaces."""
    return [event for event in events if not isinstance(event, RankState)]


def _reduce(batch: Batch, remaining: Detail | None) -> Batch | None:
    """Return the batch with only what remains; None if that is nothing."""
    events = _without_state_pages(batch.events)
    samples = batch.samples if remaining == Detail.SAMPLES else []
    if remaining is None or not (events or samples):
        return None
    return msgspec.structs.replace(batch, events=events, spans=[], samples=samples)
