"""The copies that this rank holds for ranks of other nodes."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoints.errors import CheckpointError, DamagedError
from paceline.checkpoints.memory.cost import Work
from paceline.checkpoints.memory.directory import CopyDirectory, CopyName
from paceline.checkpoints.memory.file import (
    CopyRecord,
    hashed_part,
    pack_record,
    read_record,
    unpack_record,
)
from paceline.checkpoints.memory.slots import CopySlot, NodeMemory
from paceline.checkpoints.memory.transfer import (
    Message,
    PeerConnection,
    Reply,
    RequestCopy,
    SendCopy,
)
from paceline.checkpoints.rank_group import reason_of

_SLOTS = 2  # the newest copy, and the one that is being received


class HeldCopies:
    """Takes the copies of some ranks, and gives out any copy of this node."""

    def __init__(
        self,
        directory: CopyDirectory,
        generation: int,
        ranks: frozenset[int],
        memory: NodeMemory,
        closed: threading.Event,
    ) -> None:
        """Take nothing yet.

        Args:
            directory: of this node.
            generation: of the job; copies of another one are refused.
            ranks: those whose copies are held here.
            memory: that this rank may use.
            closed: set when the training ends.
        """
        self._directory = directory
        self._generation = generation
        self.ranks = ranks
        self._memory = memory
        self._closed = closed
        self.taking_cost: Callable[[float], object] = lambda seconds: None  # for all ranks
        self._is_off = False
        self._slots: dict[int, list[CopySlot]] = {rank: [] for rank in ranks}
        self._locks = {rank: threading.Lock() for rank in ranks}  # connections may overlap

    def free(self) -> None:
        """Delete the copies that are held, and take none: the job makes none any more."""
        self._is_off = True
        for rank, lock in self._locks.items():
            with lock:
                for slot in self._slots[rank]:
                    slot.free()
                self._slots[rank].clear()

    def serve(self, connection: PeerConnection, message: Message) -> None:
        """Answer one message. Raises OSError or CheckpointError if the connection is broken."""
        if isinstance(message, SendCopy):
            self._take(connection, unpack_record(message.block))
        elif isinstance(message, RequestCopy):
            self._give(connection, message)
        else:
            raise CheckpointError("a reply without a request")

    def _take(self, connection: PeerConnection, record: CopyRecord) -> None:
        if record.rank not in self.ranks or record.generation != self._generation:
            connection.send(Reply("this rank does not hold such copies"))
            return
        with self._locks[record.rank]:
            work = Work()
            try:
                slot = self._slot(record)
                slot.reuse()
            except (OSError, CheckpointError) as error:
                connection.send(Reply(reason_of(error)))
                return
            connection.send(Reply())
            digest = hashlib.sha256()
            content = hashed_part(slot.content, record.total_bytes)
            connection.receive_content(content, digest.update)
            if digest.digest() != record.sha256:
                connection.send(Reply("the content does not match its SHA-256"))
                return
            name = CopyName(record.generation, record.step, record.rank)
            slot.complete(record, self._directory.file(name))
            connection.send(Reply())
            self.taking_cost(len(self.ranks) * work.lost_seconds())

    def _slot(self, record: CopyRecord) -> CopySlot:
        """Return a slot that is not the newest copy's. Raises CheckpointError without memory."""
        if self._is_off:
            raise CheckpointError("copies are off")
        slots = self._slots[record.rank]
        newest = max((s.record.step for s in slots if s.record is not None), default=None)
        free = [s for s in slots if s.record is None or s.record.step != newest]
        for slot in free:
            if slot.capacity >= record.total_bytes:
                return slot
            slots.remove(slot)
            slot.free()
            self._memory.release(slot.capacity)
        capacity = record.total_bytes + record.total_bytes // 16
        self._memory.reserve(capacity)
        name = f"g{record.generation:08}.r{record.rank:06}.{os.getpid()}.h{record.step}.part"
        slots.append(CopySlot(self._directory.path / name, capacity))
        return slots[-1]

    def _give(self, connection: PeerConnection, message: RequestCopy) -> None:
        name = CopyName(message.generation, message.step, message.rank)
        path = self._directory.file(name)
        try:
            record = read_record(path)
            content = _read_part(path, record)
        except (OSError, DamagedError) as error:
            connection.send(Reply(reason_of(error)))
            return
        connection.send(Reply(block=pack_record(record)))
        connection.send_content(content, None, self._closed)


def _read_part(path: Path, record: CopyRecord) -> memoryview:
    """Return the content of a file after its record; the receiver checks its SHA-256."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(content) < record.total_bytes:
        raise DamagedError(f"{path.name} is incomplete")
    return hashed_part(content, record.total_bytes)
