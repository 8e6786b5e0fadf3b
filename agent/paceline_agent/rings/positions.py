"""How far each ring is in the spool, so that the next agent loses nothing and sends nothing twice.

Written right after batches went to the spool, before any of them can be sent: what the spool holds
beyond the last record was packed between the two, and counts as read.
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
    sequence: int  # of the last batch that is accounted for
    read: list[tuple[str, int, int, int]]  # job, generation, rank, records


_decoder = msgspec.json.Decoder(_Record)


class Positions:
    """One small file on the node's tmpfs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved: dict[RankKey, int] | None = None

    def save(self, boot_id: str, sequence: int, read: Mapping[RankKey, int]) -> None:
        if read == self._saved:
            return
        self._saved = dict(read)
        record = _Record(boot_id, sequence, [(*key, count) for key, count in read.items()])
        temporary = self._path.with_suffix(".writing")
        try:
            temporary.write_bytes(msgspec.json.encode(record))
            os.rename(temporary, self._path)
        except OSError as error:  # a full tmpfs: the next agent joins at the rings' heads
            log.warning("%s cannot be written: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def load(self, spool: Spool) -> dict[RankKey, int] | None:
        """Of a ring that is not named nothing was packed; None: of no ring is anything known."""
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
