"""The trainer collector: reads the rings of this node's ranks.

Rings appear in one directory. Each is attached once; from then on its new spans, definitions,
acknowledgements and, at a slower pace, its state page go to the outbox. Spans are never looked at
one by one: a block of records is cut into columns and sent as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.contract import LocalRank
from paceline_agent.collect.kept_files import entries, inode_of
from paceline_agent.collect.processes import process_status, process_that_maps
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings.clock_offset import ClockOffset
from paceline_wire import ring
from paceline_wire.batch import (
    Event,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankExited,
    RankState,
    SpanBlock,
)
from paceline_wire.ring import (
    Acknowledgement,
    AckStatus,
    ControlKind,
    Identity,
    RingError,
    RingReader,
)
from paceline_wire.spans import to_columns

log = logging.getLogger(__name__)

STATE_SECONDS = 0.5
RECORDS_PER_BLOCK = 1 << 14
_LIMIT = 1 << 63  # of what the server stores: it refuses a batch that holds more


class RankKey(NamedTuple):
    job: str
    generation: int
    rank: int


@dataclass(slots=True)
class _Attached:
    """One open ring."""

    reader: RingReader
    key: RankKey
    pid: int  # as this node counts, not its container
    inode: int
    size_bytes: int
    reported_lost: int = 0
    acknowledged: Acknowledgement | None = None
    seen_alive: bool = False


@dataclass(slots=True)
class RingCounts:
    corrupt: int = 0
    lost_spans: int = 0
    spans: int = 0


class Rings:
    """All rings in `directory`.

    Ranks that the agent started itself are finished by its supervisor, through `finish`; others
    (started by torchrun, say) when their process is seen to be gone.
    """

    def __init__(self, directory: Path, outbox: Outbox, procfs_root: Path = Path("/proc")) -> None:
        self.counts = RingCounts()
        self.supervised: set[RankKey] = set()
        self._directory = directory
        self._outbox = outbox
        self._procfs_root = procfs_root
        self._clock = ClockOffset()
        self._attached: dict[Path, _Attached] = {}
        self._refused: dict[Path, tuple[int, int]] = {}  # inode and change of files that are none
        self._state_due = 0.0

    def __len__(self) -> int:
        return len(self._attached)

    def clean(self, read: Mapping[RankKey, int] | None = None) -> None:
        """Before the first poll: tell what ended meanwhile, go on with the rings of the living.

        `read` is how much of each ring an earlier agent had packed. Where that is not known (None),
        rings are joined at their heads: sending a span twice would count it twice. A rank that was
        adopted may have ended meanwhile: its supervisor will finish its ring.
        """
        self._discover()
        for attached in list(self._attached.values()):
            reader = attached.reader
            head = reader.state[ring.STATE_HEAD]
            reader.position = head if read is None else min(read.get(attached.key, 0), head)
            ended = process_status(self._procfs_root, attached.pid) is None
            if ended and attached.key not in self.supervised:
                self._finish_foreign(attached)

    @property
    def positions(self) -> dict[RankKey, int]:
        """How many records of each ring were read or found lost."""
        return {each.key: each.reader.position for each in self._attached.values()}

    def poll(self) -> None:
        """Look for new rings and read all of them."""
        self._discover()
        now = time.monotonic()
        state_is_due = now >= self._state_due
        if state_is_due:
            # Looks come a little early or late: the one meant is not to be missed by a millisecond.
            self._state_due = now + 0.75 * STATE_SECONDS
        for attached in list(self._attached.values()):
            self._tend(attached, state_is_due)

    def finish(self, key: RankKey) -> None:
        """Read what is left of an ended rank, its state page included, and let go of its ring."""
        self._discover()
        for attached in list(self._attached.values()):
            if attached.key == key and self._read(attached, with_state=True):
                self._drop(attached, delete=True)
        self.supervised.discard(key)

    def remove_before(self, job: str, generation: int) -> None:
        """Delete the rings that older generations of `job` left behind."""
        for attached in list(self._attached.values()):
            if attached.key.job == job and attached.key.generation < generation:
                self._drop(attached, delete=True)

    def control(
        self, job: str, generation: int, command_id: int, kind: int, target_step: int
    ) -> list[int]:
        """Write a command to the control page of each rank of a generation; which ranks."""
        self._discover()
        ranks = []
        for attached in list(self._attached.values()):
            if attached.key[:2] == (job, generation) and self._is_whole(attached):
                attached.reader.command(command_id, kind, target_step)
                ranks.append(attached.key.rank)
        log.info("control %s written to ranks %s of %s", ControlKind.NAMES[kind], ranks, job)
        return ranks

    def pid(self, job: str, generation: int, rank: int) -> int | None:
        """Of a rank that lives here, as this node counts."""
        key = RankKey(job, generation, rank)
        for attached in self._attached.values():
            if attached.key == key:
                return attached.pid
        return None

    def local_ranks(self) -> list[LocalRank]:
        """A snapshot, for collectors in other threads."""
        attached = list(self._attached.values())
        return [_local_rank(each.reader.identity, each.pid) for each in attached]

    def close(self) -> None:
        for attached in list(self._attached.values()):
            self._drop(attached, delete=False)

    def _discover(self) -> None:
        try:
            entries = [
                entry for entry in os.scandir(self._directory) if entry.name.endswith(ring.SUFFIX)
            ]
        except OSError:
            return
        for entry in entries:
            path = Path(entry.path)
            try:
                status = os.stat(path)
            except OSError:
                continue
            known = self._attached.get(path)
            if known is not None and known.inode != status.st_ino:
                self._let_go(known)
            if path not in self._attached and self._refused.get(path) != _version(status):
                self._attach(path, status)
                if known is not None:
                    self._tell_of_two(known, self._attached.get(path))

    def _tell_of_two(self, first: _Attached, second: _Attached | None) -> None:
        """Processes with one name, of which only the later one is watched."""
        if second is None or second.pid == first.pid or first.key in self.supervised:
            return
        if process_status(self._procfs_root, first.pid) is not None:
            log.warning(
                "processes %d and %d both say that they are rank %d of %s: only the later one is "
                "watched; give each run a PACELINE_JOB of its own",
                *(first.pid, second.pid, first.key.rank, first.key.job),
            )

    def _let_go(self, attached: _Attached) -> None:
        """Of a ring in whose place there is another: of the next run, as a rule."""
        ended = process_status(self._procfs_root, attached.pid) is None
        if ended and attached.key not in self.supervised:
            self._finish_foreign(attached)
        else:
            self._drop(attached, delete=False)

    def _attach(self, path: Path, status: os.stat_result) -> None:
        try:
            reader = RingReader(path)
        except RingError as error:
            self._refuse(path, error)
            return
        identity = reader.identity
        key = RankKey(identity.job, identity.generation, identity.rank)
        for other in list(self._attached.values()):
            if other.key == key:  # the newer file wins
                self._drop(other, delete=False)
        self._refused.pop(path, None)
        pid = process_that_maps(self._procfs_root, status, identity.pid)
        self._attached[path] = _Attached(reader, key, pid, status.st_ino, status.st_size)
        log.info("attached rank %d of %s generation %d", key.rank, key.job, key.generation)
        self._outbox.put_events([RankAttached(time_ns=timeline_ns(), identity=identity)])

    def _refuse(self, path: Path, error: RingError) -> None:
        with contextlib.suppress(OSError):
            self._refused[path] = _version(os.stat(path))
        self.counts.corrupt += 1
        log.warning("ring skipped: %s", error)

    def _tend(self, attached: _Attached, state_is_due: bool) -> None:
        if not state_is_due or attached.key in self.supervised:
            self._read(attached, state_is_due)
        elif process_status(self._procfs_root, attached.pid) is not None:
            attached.seen_alive = True
            self._read(attached, state_is_due)
        elif attached.seen_alive or self._says_it_ended(attached):
            self._finish_foreign(attached)

    def _says_it_ended(self, attached: _Attached) -> bool:
        """Of a rank that was never seen: it was too short-lived, or is where we see no pid."""
        status = attached.reader.state[ring.STATE_STATUS] if self._is_whole(attached) else None
        return status in (ring.Status.FINISHED, ring.Status.FAILED)

    def _finish_foreign(self, attached: _Attached) -> None:
        """A rank that somebody else started is gone; nobody could tell us its exit code."""
        if not self._read(attached, with_state=True):
            return
        finished = attached.reader.view().status == "finished"
        exited = RankExited(
            time_ns=timeline_ns(),
            pid=attached.reader.identity.pid,
            exit_code=0 if finished else None,
            **attached.key._asdict(),
        )
        self._outbox.put_events([exited])
        self._drop(attached, delete=True)

    def _read(self, attached: _Attached, with_state: bool) -> bool:
        """One look at one ring; a corrupt one (False) is counted, named once and left alone."""
        try:
            if not self._is_whole(attached):
                raise RingError(f"{attached.reader.path}: truncated while in use")
            self._read_definitions(attached)
            self._read_spans(attached)
            self._read_acknowledgement(attached)
            if with_state:
                self._outbox.put_events([self._state(attached)])
        except RingError as error:
            self._drop(attached, delete=False)
            self._refuse(attached.reader.path, error)
            return False
        return True

    def _is_whole(self, attached: _Attached) -> bool:
        """A mapped file that was cut short would end us with SIGBUS."""
        try:
            status = os.stat(attached.reader.path)
        except OSError:
            return True  # unlinked: the mapping stays
        return status.st_ino != attached.inode or status.st_size >= attached.size_bytes

    def _read_definitions(self, attached: _Attached) -> None:
        definitions = attached.reader.new_definitions()
        if definitions:
            event: Event = RankDefined(
                time_ns=timeline_ns(), definitions=definitions, **attached.key._asdict()
            )
            self._outbox.put_events([event])

    def _read_spans(self, attached: _Attached) -> None:
        """At most what the ring holds: a rank that outruns us does not keep us here."""
        reader = attached.reader
        offset_ns = self._clock.read_ns()
        for _ in range(0, reader.capacity, RECORDS_PER_BLOCK):
            records = reader.read(RECORDS_PER_BLOCK)
            lost = reader.lost - attached.reported_lost
            if not records and not lost:
                return
            block = SpanBlock(
                columns=to_columns(records),
                clock_offset_ns=offset_ns,
                lost=lost,
                **attached.key._asdict(),
            )
            attached.reported_lost = reader.lost
            self.counts.lost_spans += lost
            self.counts.spans += block.count
            self._outbox.put_spans([block])

    def _read_acknowledgement(self, attached: _Attached) -> None:
        now = attached.reader.acknowledgement()
        if now is None or now == attached.acknowledged:
            return
        attached.acknowledged = now
        if not 0 < now.status < len(AckStatus.NAMES):
            raise RingError(f"{attached.reader.path}: acknowledgement status {now.status}")
        if max(now.command_id, now.step) >= _LIMIT:
            raise RingError(f"{attached.reader.path}: acknowledgement of {now}")
        event = RankAcknowledged(
            time_ns=timeline_ns(),
            command_id=now.command_id,
            status=str(AckStatus.NAMES[now.status]),
            step=now.step,
            **attached.key._asdict(),
        )
        self._outbox.put_events([event])

    def _state(self, attached: _Attached) -> RankState:
        status = process_status(self._procfs_root, attached.pid)
        return RankState(
            time_ns=timeline_ns(),
            clock_offset_ns=self._clock.read_ns(),
            view=attached.reader.view(),
            process_state=status.state if status else None,
            cpu_seconds=status.cpu_seconds if status else None,
            **attached.key._asdict(),
        )

    def _drop(self, attached: _Attached, *, delete: bool) -> None:
        self._attached.pop(attached.reader.path, None)
        attached.reader.close()
        # In its place there may be another by now.
        if delete and inode_of(attached.reader.path) == attached.inode:
            attached.reader.path.unlink(missing_ok=True)


def ranks_in(directory: Path, procfs_root: Path) -> list[LocalRank]:
    """Who lives here by the rings in `directory`; nothing else is read, and nothing written."""
    found: list[LocalRank] = []
    for name in entries(directory):
        path = directory / name
        if path.suffix != ring.SUFFIX:
            continue
        try:
            reader = RingReader(path)
            status = path.stat()
        except (RingError, OSError):
            continue
        identity = reader.identity
        reader.close()
        pid = process_that_maps(procfs_root, status, identity.pid)
        if process_status(procfs_root, pid) is not None:
            found.append(_local_rank(identity, pid))
    return sorted(found, key=lambda rank: (rank.job, rank.rank))


def _local_rank(identity: Identity, pid: int) -> LocalRank:
    return LocalRank(
        job=identity.job,
        generation=identity.generation,
        rank=identity.rank,
        local_rank=identity.local_rank,
        pid=pid,
        gpu_uuid=identity.gpu_uuid,
    )


def _version(status: os.stat_result) -> tuple[int, int]:
    """Another file, or this one written anew."""
    return status.st_ino, status.st_mtime_ns
