"""The read position of each ring, saved so that the next agent loses no span and sends none twice.

The file is written right after batches are in the spool, before any of them can be sent. Batches in
the spool beyond the saved one were packed after it, and count as read.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline_agent.forward.spool import Spool
from paceline_agent.rings.reader import RankKey

log = logging.getLogger(__name__)


class _Record(msgspec.Struct):
    boot_id: str
    sequence: int  # last batch that `read` includes
    read: list[tuple[str, int, int, int]]  # job, generation, rank, records


_decoder = msgspec.json.Decoder(_Record)


class Positions:
    """The saved positions: one small file on the node's tmpfs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved: dict[RankKey, int] | None = None

    def save(self, boot_id: str, sequence: int, read: Mapping[RankKey, int]) -> None:
        """Write the positions as of this batch, if they changed."""
        if read == self._saved:
            return
        self._saved = dict(read)
        record = _Record(boot_id, sequence, [(*key, count) for key, count in read.items()])
        temporary = self._path.with_suffix(".writing")
        try:
            temporary.write_bytes(msgspec.json.encode(record))
            os.rename(temporary, self._path)
        except OSError as error:  # a full tmpfs: the next agent starts at the rings' heads
            log.warning("%s cannot be written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def load(self, spool: Spool) -> dict[RankKey, int] | None:
        """Return the positions; None if they are unknown. A ring without one was not read yet."""
        try:
            record = _decoder.decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        read = {
            RankKey(job, generation, rank): count for job, generation, rank, count in record.read
        }
        for batch in spool.batches_after(record.boot_id, record.sequence):
            for block in batch.spans:
                key = RankKey(block.job, block.generation, block.rank)
                read[key] = read.get(key, 0) + block.count + block.lost
        return read
