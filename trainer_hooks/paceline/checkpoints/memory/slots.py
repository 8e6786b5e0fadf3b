"""Files that copies are written to, mapped by the rank that writes them.

Their space is reserved before the first write: a full file system is an error then, where a write
to a mapped hole would kill the process. A rank has few slots, and uses them again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.checkpoints.errors import CheckpointError
from paceline.checkpoints.memory.captures import CapturedPart, Captures
from paceline.checkpoints.memory.deferred import DeferredCopy, LiveTensors, TensorPlan
from paceline.checkpoints.memory.device import pin, unpin
from paceline.checkpoints.memory.file import (
    ALIGNMENT,
    BLOCK_BYTES,
    CopyRecord,
    TensorPlace,
    hashed_part,
    local_of,
    pack_record,
    sharding_of,
    view_of,
)
from paceline.checkpoints.parts import unstorable_kind

_SPARE_BYTES = 64 * 1024  # for rests that grow


class NodeMemory:
    """The memory that one rank may use for files."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()  # never taken by the training thread

    def reserve(self, count: int) -> None:
        """Take memory. Raises CheckpointError if it is too much."""
        with self._lock:
            if self._used_bytes + count > self.most_bytes:
                raise CheckpointError(
                    f"copies need {self._used_bytes + count:,} bytes of memory and this rank may "
                    f"use {self.most_bytes:,}; PACELINE_MEMORY_BYTES sets the limit of a node"
                )
            self._used_bytes += count

    def release(self, count: int) -> None:
        with self._lock:
            self._used_bytes -= count


class CopyLayout:
    """The places of a rank's tensors in its files. It stays the same while the tensors do."""

    def __init__(self, captures: Captures, rests_bytes: int) -> None:
        """Lay out the tensors. Raises CheckpointError if one cannot be copied as it is."""
        self.key = captures.key
        places, offset = [], 0
        for name, tensor in captures.tensors.items():
            local = local_of(tensor)
            kind = unstorable_kind(local) if type(local) is Tensor else type(local).__name__
            if kind is not None:
                raise CheckpointError(f"{name} is a {kind}, which is not copied to memory")
            dtype = str(local.dtype).removeprefix("torch.")
            places.append(TensorPlace(name, dtype, tuple(local.shape), offset, sharding_of(tensor)))
            offset += -(-local.numel() * local.itemsize // ALIGNMENT) * ALIGNMENT
        # Offsets are of about as many digits once they count from the begin of the file.
        size = len(msgspec.msgpack.encode(places)) + 8 * len(places)
        begin = -(-(BLOCK_BYTES + size) // BLOCK_BYTES) * BLOCK_BYTES
        self.places = [msgspec.structs.replace(p, offset=begin + p.offset) for p in places]
        self.table = msgspec.msgpack.encode(self.places)
        assert BLOCK_BYTES + len(self.table) <= begin, "an offset takes at most 9 bytes"
        self.rests_offset = begin + offset
        self.capacity = self.rests_offset + 2 * rests_bytes + _SPARE_BYTES

    def fits(self, captures: Captures) -> bool:
        return self.key == captures.key


class CopySlot:
    """A mapped file of one copy, or of none yet."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Create the file and reserve its space. Raises OSError if memory is full."""
        self.part = path  # its name while it is no complete copy
        self.path = path
        self.record: CopyRecord | None = None  # that of the complete copy
        self.capacity = capacity
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, capacity)
            self.content = mmap.mmap(descriptor, capacity)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._bytes = torch.frombuffer(self.content, dtype=torch.uint8)
        self._bytes.zero_()  # maps all pages now: the training thread would wait for it later
        self._pinned_for: torch.device | None = None
        self._layout: CopyLayout | None = None
        # By part, with the version and the live tensors that they were made for.
        self._plans: dict[str, tuple[int, LiveTensors, TensorPlan]] = {}
        self.written_bytes = 0

    def pin(self, device: torch.device) -> None:
        """Lock the memory for copies from a GPU, if that is possible."""
        if pin(self.content, device):
            self._pinned_for = device

    def unpin(self) -> None:
        """Unlock the memory. No GPU copies to it any more."""
        device, self._pinned_for = self._pinned_for, None
        if device is not None:
            unpin(self.content, device)

    def free(self) -> None:
        """Delete the file; its memory is freed once nothing has it mapped."""
        self.unpin()
        self.path.unlink(missing_ok=True)

    def copied_step(self) -> int:
        """Return the step of the copy; without one 0, before all steps."""
        return 0 if self.record is None else self.record.step

    def reuse(self) -> None:
        """Take the file out of the complete copies. Raises OSError if it was deleted."""
        self.record = None
        if self.path != self.part:
            os.rename(self.path, self.part)
            self.path = self.part

    def write(
        self, layout: CopyLayout, captures: Captures, rests: bytes, live: LiveTensors
    ) -> DeferredCopy:
        """Copy a state. Return the part that is copied later.

        Args:
            layout: the places of the tensors.
            captures: the state.
            rests: its rests.
            live: what only the next step of an optimizer changes.

        Raises CheckpointError if the rests have grown beyond the file.
        """
        end = layout.rests_offset + len(rests)
        if end > self.capacity:
            raise CheckpointError("the state has grown")
        if self._layout is not layout:
            self.content[BLOCK_BYTES : BLOCK_BYTES + len(layout.table)] = layout.table
            self._layout, self._plans = layout, {}
        self.content[layout.rests_offset : end] = rests
        self.written_bytes = end
        places = iter(layout.places)
        plans = [
            self._plan(part, list(islice(places, len(part.locals))), live)
            for part in captures.parts
        ]
        return DeferredCopy(plans)

    def _plan(
        self, part: CapturedPart, places: Sequence[TensorPlace], live: LiveTensors
    ) -> TensorPlan:
        """Return the plan of a part, the one of its last copy if nothing has changed."""
        version, known, plan = self._plans.get(part.name, (None, None, None))
        if plan is None or version != part.version or known is not live:
            targets = [
                view_of(self._bytes, place.offset, tensor.dtype, place.shape)
                for place, tensor in zip(places, part.locals, strict=True)
            ]
            plan = TensorPlan(targets, part.locals, live)
            self._plans[part.name] = part.version, live, plan
        return plan

    def digest(self, total_bytes: int) -> bytes:
        """Return the SHA-256 of all that follows the record."""
        return hashlib.sha256(hashed_part(self.content, total_bytes)).digest()

    def complete(self, record: CopyRecord, path: Path) -> None:
        """Write the record and give the file its name. Raises OSError if it was deleted."""
        self.content[:BLOCK_BYTES] = pack_record(record)
        os.rename(self.path, path)
        self.path = path
        self.record = record
