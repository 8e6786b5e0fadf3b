"""The ring reader: sends what this node's ranks write to their rings.

Rings appear in one directory. Each is attached once. From then on its new spans, definitions and
acknowledgements go to the outbox, and at a slower pace its state page. Spans are not decoded here:
a block of records is transposed into columns and sent unchanged. `admission` decides which files
are read, and how much of them at a time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from paceline_agent.clock import timeline_ns
from paceline_agent.collect.cached_files import entries, inode_of
from paceline_agent.collect.contract import Inventory, LocalRank
from paceline_agent.collect.processes import (
    ProcessKey,
    has_started_after,
    is_running,
    process_key,
    process_status,
    process_that_maps,
    process_users,
)
from paceline_agent.collect.visible_gpus import visible_gpu
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings import admission
from paceline_agent.rings.admission import RecordBudget, RingFiles, check_claim, in_turns
from paceline_agent.rings.clock_offset import ClockOffset
from paceline_agent.rings.rank_end import RankEnd
from paceline_wire import ring
from paceline_wire.batch import (
    Event,
    RankAcknowledged,
    RankAttached,
    RankDefined,
    RankState,
    SpanBlock,
)
from paceline_wire.ending import ending_path, fault_path
from paceline_wire.metadata import KUBERNETES_JOB, SLURM_JOB
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
# until a file that could not be read is tried again, and a rejected claim, which is valid once
# another job has ended
REFUSED_SECONDS = 10.0
NO_PID = 0  # the pid of no process
REFUSED_KEPT = 4096  # rejected files that are not examined again until they change
_LIMIT = 1 << 63  # the server rejects a batch with larger numbers


class RankKey(NamedTuple):
    """The identity of a rank's process."""

    job: str
    generation: int
    rank: int


@dataclass(slots=True)
class _AttachedRing:
    """One open ring."""

    reader: RingReader
    key: RankKey
    pid: int  # in the node's PID namespace, not the container's
    process: ProcessKey | None  # None: it is not visible, or has ended
    end: RankEnd
    reported_lost: int = 0
    acknowledged: Acknowledgement | None = None
    seen_alive: bool = False
    progressed_at: float = field(default_factory=time.monotonic)  # when it last wrote a span

    @property
    def inode(self) -> int:
        return self.reader.status.st_ino

    @property
    def owner(self) -> int:
        """The uid of the file's owner."""
        return self.reader.status.st_uid

    @property
    def status(self) -> int | None:
        """The status on the state page; None if the file was truncated."""
        try:
            return self.reader.state[ring.STATE_STATUS]
        except RingError:
            return None

    @property
    def has_finished(self) -> bool:
        return self.status == ring.Status.FINISHED


@dataclass(slots=True)
class RingCounts:
    """Counters of the reader since the agent started."""

    corrupt: int = 0
    lost_spans: int = 0
    spans: int = 0


class Rings:
    """All rings in `directory`.

    For a rank that the agent started, the supervisor calls `finish` at its end. A rank of an
    external job (started by torchrun, for example) is finished when its process is gone.
    """

    def __init__(
        self,
        directory: Path,
        outbox: Outbox,
        procfs_root: Path = Path("/proc"),
        inventory: Inventory | None = None,
    ) -> None:
        self.counts = RingCounts()
        self.supervised: dict[RankKey, int] = {}  # the uid that each rank was started with
        self._directory = directory
        self._outbox = outbox
        self._procfs_root = procfs_root
        self._inventory = inventory or Inventory()
        self._clock = ClockOffset()
        self._attached: dict[Path, _AttachedRing] = {}
        self._refused: dict[
            Path, tuple[tuple[int, int], float]
        ] = {}  # invalid files: (version, time until which they are skipped)
        self._warnings: Counter[int] = Counter()  # by user
        self._files = RingFiles(directory)
        self._budget = RecordBudget()
        self._state_due = 0.0

    def __len__(self) -> int:
        return len(self._attached)

    def attach_existing(self, read: Mapping[RankKey, int] | None = None) -> None:
        """Attach the rings of an earlier agent, and finish those whose rank has ended meanwhile.

        Call it before the first poll. The supervisor finishes the rings of adopted ranks.

        Args:
            read: how many records of each ring the earlier agent packed. If unknown (None), rings
                are read from their heads on: a span that is sent twice would count twice.
        """
        self._attach_new(self._files.next(1 << 16), at_start=True)
        for attached in list(self._attached.values()):
            reader = attached.reader
            try:
                head = reader.state[ring.STATE_HEAD]
            except RingError as error:
                self._drop(attached, delete=False)
                self._refuse(reader.path, reader.status, error)
                continue
            reader.position = head if read is None else min(read.get(attached.key, 0), head)
            if not self._is_alive(attached) and attached.key not in self.supervised:
                self._finish_external(attached)

    @property
    def positions(self) -> dict[RankKey, int]:
        """The number of records of each ring that were read or lost."""
        return {attached.key: attached.reader.position for attached in self._attached.values()}

    def poll(self) -> None:
        """Attach new rings, and read all rings."""
        self._discover(self.supervised)
        self._budget.renew({attached.owner for attached in self._attached.values()})
        now = time.monotonic()
        state_is_due = now >= self._state_due
        if state_is_due:
            # The margin ensures that a poll that comes slightly early still reads the state page.
            self._state_due = now + 0.75 * STATE_SECONDS
        for attached in list(self._attached.values()):
            self._poll_ring(attached, state_is_due)

    def finish(self, key: RankKey) -> None:
        """Read the rest of an ended rank's ring and its state page, then delete the ring."""
        self._discover([key])
        for attached in list(self._attached.values()):
            if attached.key == key:
                self._budget.grant(attached.owner)
                if self._read(attached, with_state=True):
                    self._drop(attached, delete=True)
        self.supervised.pop(key, None)

    def with_fatal_stack(self, key: RankKey, log: str, signal: int | None) -> str:
        """Return `RankEnd.with_fatal_stack` of a rank, whose ring is not finished yet."""
        ends = (attached.end for attached in self._attached.values() if attached.key == key)
        end = next(ends, None)
        return log if end is None else end.with_fatal_stack(log, signal)

    def remove_before(self, job: str, generation: int) -> None:
        """Delete the rings of older generations of `job`."""
        for attached in list(self._attached.values()):
            if attached.key.job == job and attached.key.generation < generation:
                self._drop(attached, delete=True)

    def control(
        self, job: str, generation: int, command_id: int, kind: int, target_step: int
    ) -> list[int]:
        """Write a command to the control page of each rank of a generation. Return these ranks."""
        self._discover(self.supervised)
        ranks = []
        for attached in list(self._attached.values()):
            if attached.key[:2] == (job, generation):
                try:
                    attached.reader.command(command_id, kind, target_step)
                except OSError as error:  # the file was truncated on a full tmpfs
                    log.warning("%s: %s", attached.reader.path, error.strerror)
                else:
                    ranks.append(attached.key.rank)
        log.info("control %s written to ranks %s of %s", ControlKind.NAMES[kind], ranks, job)
        return ranks

    def abilities(self, job: str, generation: int) -> dict[int, int]:
        """Return the commands that each rank of a generation has declared to support, as bits of
        `Ability`."""
        found = {}
        for attached in self._attached.values():
            if attached.key[:2] == (job, generation):
                with contextlib.suppress(RingError):
                    found[attached.key.rank] = attached.reader.state[ring.STATE_ABILITIES]
        return found

    def answered(self, job: str, generation: int, command_id: int) -> set[int]:
        """Return the ranks of a generation whose final answer to a command was read."""
        return {
            attached.key.rank
            for attached in self._attached.values()
            if attached.key[:2] == (job, generation)
            and (latest := attached.acknowledged) is not None
            and latest.command_id == command_id
            and latest.status in (AckStatus.DONE, AckStatus.FAILED)
        }

    def pid(self, job: str, generation: int, rank: int) -> int | None:
        """Return a rank's pid in the node's namespace; None if it is not on this node."""
        attached = self._find(job, generation, rank)
        return None if attached is None else attached.pid

    def native_thread_id(self, job: str, generation: int, rank: int) -> int | None:
        """Return which thread a rank claims to record in, in its own namespace; None: unknown."""
        attached = self._find(job, generation, rank)
        return None if attached is None else attached.reader.identity.native_thread_id

    def _find(self, job: str, generation: int, rank: int) -> _AttachedRing | None:
        key = RankKey(job, generation, rank)
        for attached in self._attached.values():
            if attached.key == key and self._is_owners(attached):
                return attached
        return None

    def external_pid(self, job: str, generation: int, rank: int, started_ns: int) -> int | None:
        """Return the pid of a rank that the agent did not start; None if it is not that process.

        `started_ns`: `Identity.started_ns` of the process.
        """
        key = RankKey(job, generation, rank)
        for attached in self._attached.values():
            is_it = attached.key == key and attached.reader.identity.started_ns == started_ns
            if is_it and key not in self.supervised and self._is_owners(attached):
                return attached.pid
        return None

    def torchrun_pids(self, job: str, generation: int) -> dict[int, int]:
        """Return the pids of a generation's ranks, by rank, that only torchrun can start again."""
        return {
            attached.key.rank: attached.pid
            for attached in self._attached.values()
            if attached.key[:2] == (job, generation)
            and attached.key not in self.supervised
            and (metadata := attached.reader.identity.metadata).get("launcher") == "torchrun"
            and not metadata.keys() & {SLURM_JOB, KUBERNETES_JOB}
        }

    def progressed_at(self, job: str, generation: int) -> float:
        """Return when a rank of this generation last ended an operation, as `time.monotonic`.

        -inf: none on this node records its operations.
        """
        moments = (
            attached.progressed_at
            for attached in self._attached.values()
            if attached.key[:2] == (job, generation)
        )
        return max(moments, default=-math.inf)

    def local_ranks(self) -> list[LocalRank]:
        """Return the ranks on this node; a snapshot, for collectors in other threads."""
        rings = list(self._attached.values())
        return [_local_rank(attached.reader.identity, attached.pid) for attached in rings]

    def report_ended(self) -> None:
        """Report now the ranks whose process has ended, without waiting for what torchrun says."""
        for attached in list(self._attached.values()):
            is_gone = not self._is_alive(attached)
            if is_gone and attached.key not in self.supervised and self._was_seen(attached):
                self._finish_external(attached)

    def close(self) -> None:
        """Detach all rings; their files stay."""
        for attached in list(self._attached.values()):
            self._drop(attached, delete=False)

    def _discover(self, expected: Iterable[RankKey]) -> None:
        """Attach new rings, first those of ranks that the agent started."""
        known = {attached.key for attached in self._attached.values()}
        for key in list(expected):
            if key not in known:
                path = self._directory / f"{key.job}.g{key.generation}.r{key.rank}{ring.SUFFIX}"
                try:
                    self._attach_new([(path, os.stat(path, follow_symlinks=False))])
                except OSError:
                    continue
        self._attach_new(self._files.next())

    def _attach_new(
        self, files: list[tuple[Path, os.stat_result]], *, at_start: bool = False
    ) -> None:
        """Attach the files that are new; the limit per poll does not apply `at_start`."""
        new, replaced = [], {}
        for path, status in files:
            previous = self._attached.get(path)
            if previous is not None and previous.inode != status.st_ino:
                replaced[path] = previous
                self._detach_replaced(previous)
            if path not in self._attached and not self._is_refused(path, status):
                new.append((path, status))
        rings_by_user = Counter(attached.owner for attached in self._attached.values())
        limit = admission.RINGS_PER_USER if at_start else admission.ATTACHED_PER_POLL
        for path, _ in in_turns(new, rings_by_user, limit):
            self._attach(path)
            if path in replaced:
                self._warn_of_same_rank(replaced[path], self._attached.get(path))

    def _is_refused(self, path: Path, status: os.stat_result) -> bool:
        version, until = self._refused.get(path, (None, 0.0))
        return version == _version(status) and time.monotonic() < until

    def _warn_of_same_rank(self, first: _AttachedRing, second: _AttachedRing | None) -> None:
        """Warn of two processes that claim to be the same rank; only the later one is watched."""
        if second is None or second.pid == first.pid or first.key in self.supervised:
            return
        if self._is_alive(first):
            log.warning(
                "processes %d and %d both claim to be rank %d of %s; only the later one is "
                "watched: set a different PACELINE_JOB for each run",
                *(first.pid, second.pid, first.key.rank, first.key.job),
            )

    def _detach_replaced(self, attached: _AttachedRing) -> None:
        """Detach a ring whose file was replaced, usually by the next run."""
        if not self._is_alive(attached) and attached.key not in self.supervised:
            self._finish_external(attached)
        else:
            self._drop(attached, delete=False)

    def supervise(self, key: RankKey, uid: int) -> None:
        """Expect the ring of a rank that the agent starts as this user."""
        self.supervised[key] = uid
        for attached in list(self._attached.values()):
            if attached.key.job == key.job and attached.owner not in (uid, admission.ROOT):
                self._drop(attached, delete=False)

    def _attach(self, path: Path) -> None:
        try:
            reader = RingReader(path)
        except RingError as error:
            # A file that could not be read, such as for lack of descriptors, may be a valid ring.
            is_unread = isinstance(error.__cause__, OSError)
            seconds = REFUSED_SECONDS if is_unread else math.inf
            with contextlib.suppress(OSError):
                self._refuse(path, os.stat(path, follow_symlinks=False), error, seconds)
            return
        identity = reader.identity
        key = RankKey(identity.job, identity.generation, identity.rank)
        found = process_that_maps(self._procfs_root, reader.status, identity.pid)
        pid = found or identity.pid
        process = process_key(self._procfs_root, pid)
        if found is None and process and has_started_after(process, identity.started_ns):
            pid, process = NO_PID, None  # the rank has ended, and another process has its pid
        try:
            check_claim(
                path,
                reader.status.st_uid,
                identity,
                starter=self.supervised.get(key),
                job_owners=self._owners_of(key.job),
                process=(self._procfs_root, pid),
            )
        except RingError as error:
            reader.close()
            self._refuse(path, reader.status, error, REFUSED_SECONDS)
            return
        for other in list(self._attached.values()):
            if other.key == key:  # the newer file wins
                self._drop(other, delete=False)
        self._refused.pop(path, None)
        end = RankEnd(self._procfs_root, reader, found)
        self._attached[path] = attached = _AttachedRing(reader, key, pid, process, end)
        attached.seen_alive = self._is_alive(attached)
        log.info("attached rank %d of %s generation %d", key.rank, key.job, key.generation)
        reported = replace(self._with_gpu(identity, pid), user=reader.status.st_uid)
        self._outbox.put_events([RankAttached(time_ns=timeline_ns(), identity=reported)])

    def _with_gpu(self, identity: Identity, pid: int) -> Identity:
        """Return the identity with the GPU that the environment of a rank makes visible to it.

        A rank that has not used its GPU yet, as before `init_process_group`, reports none.
        """
        if identity.gpu_uuid is not None:
            return identity
        gpus = self._inventory.gpus
        found = visible_gpu(gpus, self._procfs_root, pid, identity.local_rank)
        return identity if found is None else replace(identity, gpu_uuid=found.uuid)

    def _owners_of(self, job: str) -> set[int]:
        """Return the users of this job: those of the ranks that the agent started, or of rings."""
        started = {uid for key, uid in self.supervised.items() if key.job == job}
        return started or {
            attached.owner for attached in self._attached.values() if attached.key.job == job
        }

    def _is_alive(self, attached: _AttachedRing) -> bool:
        """Return whether the rank's process is visible and has not ended; its pid may be reused."""
        return attached.process is not None and is_running(self._procfs_root, attached.process)

    def _is_owners(self, attached: _AttachedRing) -> bool:
        """Return whether a ring's process runs and belongs to its owner."""
        users = process_users(self._procfs_root, attached.pid)
        return self._is_alive(attached) and attached.owner in (admission.ROOT, *users)

    def _refuse(
        self, path: Path, status: os.stat_result, error: RingError, seconds: float = math.inf
    ) -> None:
        """Skip this file for some seconds, unless it changes."""
        self.counts.corrupt += 1
        is_new = path not in self._refused
        self._refused[path] = (_version(status), time.monotonic() + seconds)
        if len(self._refused) > REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]
        self._warnings[status.st_uid] += is_new
        if is_new and self._warnings[status.st_uid] <= admission.WARNINGS_PER_USER:
            log.warning("ring skipped: %s", error)

    def _poll_ring(self, attached: _AttachedRing, state_is_due: bool) -> None:
        if not state_is_due or attached.key in self.supervised:
            self._read(attached, state_is_due)
        elif self._is_alive(attached):
            attached.seen_alive = True
            self._read(attached, state_is_due)
        elif self._was_seen(attached) and not attached.end.is_awaited(attached.has_finished):
            self._finish_external(attached)

    def _was_seen(self, attached: _AttachedRing) -> bool:
        """Return whether a process that is gone has ended, instead of being invisible here."""
        return attached.seen_alive or self._has_final_status(attached)

    def _has_final_status(self, attached: _AttachedRing) -> bool:
        """Return whether a rank whose process was never seen reports its end itself.

        It was short-lived, or its pid is not visible here.
        """
        return attached.status in (ring.Status.FINISHED, ring.Status.FAILED)

    def _finish_external(self, attached: _AttachedRing) -> None:
        """Report the end of an external rank."""
        if self._read(attached, with_state=True):
            self._outbox.put_events([attached.end.event(attached.has_finished)])
            self._drop(attached, delete=True)

    def _read(self, attached: _AttachedRing, with_state: bool) -> bool:
        """Read a ring.

        Return False if it is corrupt; it is then counted, logged once and detached.
        """
        try:
            self._read_definitions(attached)
            self._read_spans(attached)
            self._read_acknowledgement(attached)
            if with_state:
                self._outbox.put_events([self._state(attached)])
        except RingError as error:
            self._drop(attached, delete=False)
            self._refuse(attached.reader.path, attached.reader.status, error)
            return False
        return True

    def _read_definitions(self, attached: _AttachedRing) -> None:
        definitions = attached.reader.new_definitions()
        descriptions = attached.reader.new_descriptions()
        if definitions or descriptions:
            event: Event = RankDefined(
                time_ns=timeline_ns(),
                definitions=definitions,
                descriptions=descriptions,
                **attached.key._asdict(),
            )
            self._outbox.put_events([event])

    def _read_spans(self, attached: _AttachedRing) -> None:
        """Read at most the ring's capacity, so that a fast writer cannot block the agent here.

        The rest of a user's rings waits for the next poll when the user's share is used up.
        """
        reader, owner = attached.reader, attached.owner
        offset_ns = self._clock.read_ns()
        for _ in range(0, reader.capacity, RECORDS_PER_BLOCK):
            limit = min(RECORDS_PER_BLOCK, self._budget.left(owner))
            if limit <= 0:
                return
            before = reader.position
            records = reader.read(limit)
            self._budget.spend(owner, min(limit, reader.position - before))
            lost = reader.lost - attached.reported_lost
            if not records and not lost:
                return
            attached.progressed_at = time.monotonic()
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

    def _read_acknowledgement(self, attached: _AttachedRing) -> None:
        latest = attached.reader.acknowledgement()
        if latest is None or latest == attached.acknowledged:
            return
        attached.acknowledged = latest
        if not 0 < latest.status < len(AckStatus.NAMES):
            raise RingError(f"{attached.reader.path}: acknowledgement status {latest.status}")
        if max(latest.command_id, latest.step) >= _LIMIT:
            raise RingError(f"{attached.reader.path}: acknowledgement of {latest}")
        event = RankAcknowledged(
            time_ns=timeline_ns(),
            command_id=latest.command_id,
            status=str(AckStatus.NAMES[latest.status]),
            step=latest.step,
            **attached.key._asdict(),
        )
        self._outbox.put_events([event])

    def _state(self, attached: _AttachedRing) -> RankState:
        status = process_status(self._procfs_root, attached.pid)
        return RankState(
            time_ns=timeline_ns(),
            clock_offset_ns=self._clock.read_ns(),
            view=attached.reader.view(),
            process_state=status.state if status else None,
            cpu_seconds=status.cpu_seconds if status else None,
            **attached.key._asdict(),
        )

    def _drop(self, attached: _AttachedRing, *, delete: bool) -> None:
        self._attached.pop(attached.reader.path, None)
        attached.reader.close()
        attached.end.close()
        # The file may have been replaced by another ring.
        if delete and inode_of(attached.reader.path) == attached.inode:
            try:
                ending_path(attached.reader.path).unlink(missing_ok=True)
                fault_path(attached.reader.path).unlink(missing_ok=True)
                attached.reader.path.unlink(missing_ok=True)
            except OSError as error:  # the directory was prepared by root
                self._refuse(
                    attached.reader.path,
                    attached.reader.status,
                    RingError(f"{attached.reader.path}: not removed: {error.strerror}"),
                )


def ranks_in(directory: Path, procfs_root: Path) -> list[LocalRank]:
    """Return the live ranks of the rings in `directory`; reads nothing else, writes nothing."""
    ranks: list[LocalRank] = []
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
        pid = process_that_maps(procfs_root, status, identity.pid) or identity.pid
        if process_status(procfs_root, pid) is not None:
            ranks.append(_local_rank(identity, pid))
    return sorted(ranks, key=lambda rank: (rank.job, rank.rank))


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
    """Return values that change if the file is replaced or rewritten."""
    return status.st_ino, status.st_mtime_ns
