"""`MemoryCopies`: what `Checkpoints` uses to copy its state to memory, and to find it again.

The training thread copies to a free file what may change at any time, and nothing else. A thread
copies what only an optimizer changes, hashes the file, gives it its name, and polls the schedule;
another one sends it. Both may be slow, or hang: then the training thread finishes the copy itself
before the optimizer's step, finds no free file, or one that is still written, and leaves the next
copy out.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch

from paceline import hooks
from paceline.agreement import RankStore, store_of_process_group
from paceline.checkpoints.errors import CheckpointError, DamagedError
from paceline.checkpoints.layout import Saved
from paceline.checkpoints.memory.captures import Captures
from paceline.checkpoints.memory.cost import Work
from paceline.checkpoints.memory.deferred import DeferredCopy, LiveTensors, Updates
from paceline.checkpoints.memory.directory import CopyDirectory, CopyName, available_bytes
from paceline.checkpoints.memory.file import (
    CopyFile,
    CopyRecord,
    hashed_part,
    pack_record,
    unpack_record,
)
from paceline.checkpoints.memory.held import HeldCopies
from paceline.checkpoints.memory.holders import RankHost, holders_of
from paceline.checkpoints.memory.recovery import Choice, Recovery, Source
from paceline.checkpoints.memory.schedule import CopySchedule
from paceline.checkpoints.memory.slots import CopyLayout, CopySlot, NodeMemory
from paceline.checkpoints.memory.transfer import (
    CopyServer,
    PeerConnection,
    Reply,
    RequestCopy,
    SendCopy,
    TokenBucket,
    address_towards,
)
from paceline.checkpoints.rank_group import RankGroup, first_of, reason_of
from paceline.checkpoints.trees import (
    is_decodable,
    refuse_if_unsafe,
    serialize,
    serialize_plain,
)
from paceline.environment import MemorySettings, memory_settings, store_host

_log = logging.getLogger(__name__)

SHARE_OF_FREE_MEMORY = 0.5  # that all ranks of a node take at most
# The newest copy, the one before, which ranks that are slower have too, and one to write.
OWN_SLOTS = 3
# With another node, the newest copy that is there and the one on its way must stay too.
OWN_SLOTS_OF_SENDERS = 4
LONGEST_PAUSE_SECONDS = 300.0  # after failed transfers
_CLOSE_SECONDS = 2.0
_NOTHING_LIVE: LiveTensors = {}  # if nothing is deferred
_awaited: list[CopySlot] = []  # whose memory is not freed, because a GPU that hangs may write to it


class _DroppedCopies(NamedTuple):
    """Complete copies of a training that the script has dropped."""

    pid: int
    directory: CopyDirectory
    generation: int
    ranks: frozenset[int]
    is_over: bool  # to be deleted at the end of the process, too


_dropped: list[_DroppedCopies] = []


class _RankNode(NamedTuple):
    """One rank's view of its node; `problem`: why it cannot make copies."""

    host: RankHost
    most_bytes: int
    problem: str | None
    secret: bytes  # that of rank 0 counts


class _JobRanks(NamedTuple):
    """The ranks of the job, as all of them see them."""

    group: RankGroup
    first_ranks: list[int]  # for each rank, the first one of its node
    holders: list[int | None]
    addresses: Sequence[tuple[str, int] | None]
    secret: bytes


def open_copies(
    peers: RankGroup,
    run: str,
    generation: int,
    captures: Captures,
    report: Callable[[str], None],
) -> MemoryCopies | None:
    """Prepare copies in memory on all ranks. Return None if one of them cannot make any.

    Args:
        peers: all ranks, which make the same calls.
        run: identity of the checkpoint directory.
        generation: of the job.
        captures: the state. Only its optimizers change their parameters and states.
        report: called on a rank with the reason why there are no copies, or none on another node.
    """
    settings, directory, node = _prepare(run)
    nodes = peers.gather(node)
    problem = next((each.problem for each in nodes if each.problem is not None), None)
    if problem is not None or settings is None or directory is None:
        if problem and peers.rank == 0:
            report(problem)
        return None
    hosts = [each.host for each in nodes]
    holders = holders_of(hosts)
    if not settings.peer_bytes_per_second:
        holders = [None for _ in hosts]
    secret = nodes[0].secret
    memory = NodeMemory(node.most_bytes // hosts.count(node.host))
    closed = threading.Event()
    held = HeldCopies(
        directory,
        generation,
        frozenset(rank for rank, holder in enumerate(holders) if holder == peers.rank),
        memory,
        closed,
    )
    server, address = None, None
    if any(holder is not None for holder in holders):
        try:
            host = settings.peer_address or address_towards(store_host())
            server = CopyServer(host, secret, settings.peer_tls, held.serve)
            address = (host, server.port)
        except OSError as error:
            report(f"no copies from other nodes are held here: {error}")
    try:
        store, problem = None, None
        if peers.group is not None:
            store = store_of_process_group(torch.distributed, f"memory/{run}/{generation}")
    except RuntimeError as error:  # a store that cannot be used from a second thread
        store, problem = None, f"the store cannot be cloned: {error}"
    addresses, problems = zip(*peers.gather((address, problem)), strict=True)
    problem = first_of(problems)
    if problem is not None:
        if peers.rank == 0:
            report(problem)
        return None
    first_ranks = [hosts.index(host) for host in hosts]
    every = _JobRanks(peers, first_ranks, holders, addresses, secret)
    return MemoryCopies(
        settings,
        directory,
        every,
        generation,
        memory,
        store,
        held,
        server,
        closed,
        captures,
        report,
    )


def _prepare(run: str) -> tuple[MemorySettings | None, CopyDirectory | None, _RankNode]:
    nowhere, secret = RankHost("", ""), secrets.token_bytes(32)
    try:
        settings = memory_settings()
        if settings.root is None:
            return settings, None, _RankNode(nowhere, 0, "", secret)
        directory = CopyDirectory(settings.root, run)
        _remove_dropped(run)
        # The files of earlier generations are deleted before there are new ones.
        free_bytes = available_bytes(settings.root) + directory.used_bytes()
        most_bytes = settings.limit_bytes or int(SHARE_OF_FREE_MEMORY * free_bytes)
    except (OSError, CheckpointError, ValueError) as error:
        return None, None, _RankNode(nowhere, 0, reason_of(error), secret)
    host = RankHost(settings.failure_domain, f"{settings.boot} {settings.root}")
    return settings, directory, _RankNode(host, most_bytes, None, secret)


class MemoryCopies:
    """The copies of one rank. The thread that trains calls `step_ended`."""

    def __init__(
        self,
        settings: MemorySettings,
        directory: CopyDirectory,
        peers: _JobRanks,
        generation: int,
        memory: NodeMemory,
        store: RankStore | None,
        held: HeldCopies,
        server: CopyServer | None,
        closed: threading.Event,
        captures: Captures,
        report: Callable[[str], None],
    ) -> None:
        self.disk: Saved | None = None  # the newest checkpoint on disk
        self.skipped = 0  # copies that were left out because the one before was not complete
        self.is_off = False
        self._is_left = False  # by the training thread, because copies are off
        self._is_on_host = True  # at the end: no GPU copies any more
        self._directory = directory
        self._pid = os.getpid()  # a forked process has the files, but they are not its own
        self._peers = peers
        self._rank, self._size = peers.group.rank, peers.group.size
        self._generation = generation
        self._memory = memory
        self._held = held
        self._server = server
        self._closed = closed
        self._captures = captures
        self._updates = Updates(captures.optimizers)
        self._defers = True  # until a deferred copy was changed
        self._report = report
        self._tls = settings.peer_tls
        self._schedule = CopySchedule(store, self._rank, self._size, settings.overhead_ratio)
        held.taking_cost = self._schedule.taking_cost
        self._layout: CopyLayout | None = None
        self._serialize: Callable[[Any], bytes] = serialize_plain
        self._slots: list[CopySlot] = []
        self._has_older_copies = True  # this node may have some of earlier generations
        self._has_old_files = False  # those of a state that was smaller
        self._is_writing = False  # the newest file is not complete yet
        self._completed = 0
        self._newest: CopySlot | None = None
        self._sending: CopySlot | None = None
        self._sent: CopySlot | None = None  # on the other node
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[CopySlot | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="paceline-copies", daemon=True)
        self._worker.start()
        self._holder: tuple[str, int] | None = None
        self._connection: PeerConnection | None = None
        self._send_after = 0.0  # clock, after failures
        self._failures = 0  # transfers in a row
        holder = peers.holders[self._rank]
        if holder is not None:
            self._holder = peers.addresses[holder]
        if self._holder is not None:
            local_ranks = peers.first_ranks.count(peers.first_ranks[self._rank])
            self._bucket = TokenBucket(settings.peer_bytes_per_second / local_ranks)
            self._schedule.expect_transfers()
            threading.Thread(target=self._send_all, name="paceline-copies", daemon=True).start()

    # At the start

    def find(
        self, disk: Sequence[Saved], check: Callable[[CopyFile], str | None]
    ) -> tuple[Choice, CopyFile] | None:
        """Return the step to load and this rank's copy of it; None: the disk has the best one.

        All ranks call it.

        Args:
            disk: committed checkpoints, the best one first.
            check: returns why this rank cannot load a copy.
        """
        recovery = Recovery(
            self._directory,
            self._peers.group,
            self._peers.first_ranks,
            self._directory.run,
            self._fetch,
            check,
        )
        return recovery.find(disk)

    def is_from_peer(self, choice: Choice) -> bool:
        """Return whether any rank loads a copy of another node."""
        first = self._peers.first_ranks
        return any(source.at != first[rank] for rank, source in enumerate(choice.sources))

    def resumed(self, saved: Saved | None) -> None:
        """Delete all copies but those that were loaded. All ranks have loaded theirs."""
        self._directory.delete(
            lambda name: (
                name.generation < self._generation and saved != Saved(name.generation, name.step)
            )
        )

    def _fetch(self, source: Source) -> None:
        """Copy a file of another node to this one. Raises OSError or CheckpointError."""
        address = self._peers.addresses[source.at]
        if address is None:
            raise CheckpointError(f"rank {source.at} offers no copies")
        with closing(PeerConnection.open(address, self._peers.secret, self._tls)) as connection:
            connection.send(RequestCopy(*source.name))
            record = unpack_record(_answer_of(connection).block)
            if CopyName(record.generation, record.step, record.rank) != source.name:
                raise DamagedError(f"rank {source.at} has another copy than {source.name.file}")
            if record.total_bytes > available_bytes(self._directory.path):
                raise CheckpointError(f"no memory for {source.name.file}")
            number = f"g{record.generation:08}.r{record.rank:06}.{os.getpid()}.f{record.step}"
            part = self._directory.path / f"{number}.part"
            slot = CopySlot(part, record.total_bytes)
            try:
                connection.receive_content(hashed_part(slot.content, record.total_bytes))
                slot.complete(record, self._directory.file(source.name))
            finally:
                part.unlink(missing_ok=True)

    # In the loop

    def step_ended(self, step: int) -> bool:
        """Copy the state if it is time. Return whether it was. Errors turn copies off."""
        if self.is_off:
            self._leave()
            return False
        self._schedule.waited(self._updates.take_waited())
        is_due = self._schedule.step_ended(step)
        if not is_due and self._layout is not None:
            return False
        if self._is_writing:
            self.skipped += 1
            return False
        try:
            return self._copy(step)
        except Exception as error:  # raised by the script's own objects too: training continues
            self._turn_off(reason_of(error))
            return False

    def _leave(self) -> None:
        """Have the memory freed, once the last copy is complete."""
        if not self._is_left:
            self._is_left = True
            self._updates.close()
            self._tasks.put(self._free)

    def _copy(self, step: int) -> bool:
        started = monotonic()
        captures = self._captures
        captures.capture()
        content = self._serialize(captures.rests)  # all parts at once take less time
        layout = self._layout
        if layout is None or not layout.fits(captures):
            layout = self._layout = CopyLayout(captures, len(content))
        if not self._slots or self._slots[0].capacity < layout.rests_offset + len(content):
            self._is_writing = True
            by_part = {name: serialize(rest) for name, rest in captures.rests.items()}
            layout = CopyLayout(captures, len(content))
            self._tasks.put(partial(self._allocate, layout, by_part, content, captures.gpu))
            return False
        sending = self._sending  # read before `_sent`, which is set first
        used = (sending, self._sent, self._newest)
        slot = min((slot for slot in self._slots if slot not in used), key=CopySlot.copied_step)
        slot.reuse()
        live = self._updates.live_tensors(captures.version) if self._defers else _NOTHING_LIVE
        copy = slot.write(layout, captures, content, live)
        self._updates.finish_before_step(copy)
        self._is_writing = True
        self._tasks.put(partial(self._complete, slot, step, layout, copy))
        self._schedule.copied(monotonic() - started)
        return True

    # The thread

    def _work(self) -> None:
        is_polling = True
        while not self._closed.is_set():
            try:
                task = self._tasks.get(timeout=0.5)
            except queue.Empty:
                task = None
            try:
                if task is not None:
                    task()
            except Exception as error:
                self._turn_off(reason_of(error))
            try:
                if is_polling:
                    self._schedule.poll()
            except Exception as error:  # the store is gone: so is its host, and the job with it
                is_polling = False
                _log.debug("the schedule of copies stays as it is: %s", error)
            if self._has_older_copies and self._schedule.has_complete_step and self._completed:
                self._has_older_copies = False
                self._directory.delete(lambda name: name.generation < self._generation)
            if self._schedule.off is not None:
                self.is_off = True
        if self._is_on_host:
            for slot in self._slots:
                slot.unpin()
        else:
            _awaited.extend(self._slots)

    def _free(self) -> None:
        """Free the memory of this rank's copies, and of those that it holds."""
        self._directory.delete(self._is_own)
        for slot in self._slots:
            slot.free()
        self._slots, self._newest, self._sent = [], None, None
        self._held.free()

    def _is_own(self, name: CopyName) -> bool:
        """Return whether a copy is of this rank, and not of a generation that has taken over."""
        return name.rank == self._rank and name.generation <= self._generation

    def _turn_off(self, reason: str) -> None:
        """Stop making copies on all ranks: those of the others would be of no use."""
        if self.is_off or self._closed.is_set():
            return
        self.is_off = True
        self._tasks.put(partial(self._schedule.turn_off, reason))
        self._report(f"{reason} (rank {self._rank})")

    def _allocate(
        self,
        layout: CopyLayout,
        by_part: dict[str, bytes],
        rests: bytes,
        gpu: torch.device | None,
    ) -> None:
        """Create the files. Raises CheckpointError or OSError if there is no memory."""
        for name, content in by_part.items():
            refuse_if_unsafe(content, name)
        if not is_decodable(rests):
            self._serialize = serialize
        self._directory.delete_leftovers()
        for slot in self._slots:
            self._memory.release(slot.capacity)
            slot.unpin()
            if slot is not self._newest:
                slot.path.unlink(missing_ok=True)
        count = OWN_SLOTS if self._holder is None else OWN_SLOTS_OF_SENDERS
        try:
            self._memory.reserve(count * layout.capacity)
        except CheckpointError as error:
            if count == OWN_SLOTS:
                raise
            self._holder, count = None, OWN_SLOTS
            self._schedule.sent(None)
            self._memory.reserve(count * layout.capacity)
            self._report(f"no copies are sent to another node: {error} (rank {self._rank})")
        base = f"g{self._generation:08}.r{self._rank:06}.{os.getpid()}.{self._completed}"
        slots: list[CopySlot] = []
        try:
            for number in range(count):
                path = self._directory.path / f"{base}-{number}.part"
                slots.append(CopySlot(path, layout.capacity))
                if gpu is not None:
                    slots[-1].pin(gpu)
        except OSError:
            for slot in slots:
                slot.free()
            raise
        self._has_old_files = bool(self._slots)
        self._slots = slots
        self._is_writing = False

    def _complete(self, slot: CopySlot, step: int, layout: CopyLayout, copy: DeferredCopy) -> None:
        """Finish a copy, hash it and give it its name. Raises OSError if it was deleted."""
        started, work = monotonic(), Work()
        if not self._finish(slot, step, layout, copy):
            return
        self._schedule.deferred(work.lost_seconds())
        self._newest = slot
        self._completed += 1
        self._is_writing = False
        if self._holder is None:
            self._schedule.completed(step)
        self._schedule.hashed(monotonic() - started)
        steps = [each.record.step for each in self._slots if each.record is not None]
        if self._has_old_files and len(steps) > 1:
            self._has_old_files = False
            self._directory.delete(lambda name: self._is_own(name) and name.step < min(steps))
        is_free = self._sending is None and monotonic() >= self._send_after
        if self._holder is not None and is_free and self._schedule.is_to_send(step):
            self._sending = slot
            self._outgoing.put(slot)

    def _finish(self, slot: CopySlot, step: int, layout: CopyLayout, copy: DeferredCopy) -> bool:
        """Make a copy a complete file. Return False if it is left out."""
        disk = self.disk
        if not copy.run(self._closed):
            return False
        if not copy.is_intact:
            self._discard(step)
            return False
        record = CopyRecord(
            run=self._directory.run,
            generation=self._generation,
            step=step,
            rank=self._rank,
            world_size=self._size,
            disk=None if disk is None else (disk.generation, disk.step),
            table_bytes=len(layout.table),
            rests_offset=layout.rests_offset,
            total_bytes=slot.written_bytes,
            sha256=slot.digest(slot.written_bytes),
        )
        slot.complete(record, self._directory.file(CopyName(self._generation, step, self._rank)))
        return True

    def _discard(self, step: int) -> None:
        """Leave out a copy that was changed while it was made, and defer none from now on."""
        self._defers = False
        self._is_writing = False
        _log.warning(
            "The copy of step %d in memory is discarded (rank %d): parameters or optimizer states "
            "were changed between two steps, or by other means than optimizer.step(). From now on "
            "the training waits for its copies.",
            step,
            self._rank,
        )

    # The thread that sends

    def _send_all(self) -> None:
        while (slot := self._outgoing.get()) is not None:
            started, work = monotonic(), Work()
            try:
                self._send(slot)
            except (OSError, CheckpointError) as error:
                self._failed(error)
            else:
                if self._failures:
                    _log.info("Copies are sent to another node again (rank %d).", self._rank)
                self._failures = 0
                self._sent = slot
                self._schedule.sent(monotonic() - started)
                self._schedule.sending_cost(work.lost_seconds())
                assert slot.record is not None, "the copy is complete"
                self._tasks.put(partial(self._schedule.completed, slot.record.step))
            self._sending = None

    def _send(self, slot: CopySlot) -> None:
        if self._connection is None:
            assert self._holder is not None, "there is a holder, or nothing to send"
            secret = self._peers.secret
            self._connection = PeerConnection.open(self._holder, secret, self._tls)
        record, connection = slot.record, self._connection
        assert record is not None, "the copy is complete"
        connection.send(SendCopy(pack_record(record)))
        _answer_of(connection)
        content = hashed_part(slot.content, record.total_bytes)
        connection.send_content(content, self._bucket, self._closed)
        _answer_of(connection)

    def _failed(self, error: Exception) -> None:
        """Pause after a failed transfer, longer each time."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._failures == 0 and not self._closed.is_set():
            self._report(f"a copy was not sent to another node: {reason_of(error)}")
        self._failures += 1
        self._send_after = monotonic() + min(2.0**self._failures, LONGEST_PAUSE_SECONDS)
        self._schedule.sent(None)

    # At the end

    def close(self, *, remove: bool) -> None:
        """End the threads. `remove`: the training is complete, so that copies are of no use."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self.is_off = True
        self._is_on_host = self._updates.close(_CLOSE_SECONDS)
        self._end_threads()
        self._worker.join(_CLOSE_SECONDS)
        if remove:
            self._directory.remove(self._generation, self._ranks)

    @property
    def _ranks(self) -> frozenset[int]:
        """The ranks whose copies this process makes or holds."""
        return self._held.ranks | {self._rank}

    def _end_threads(self) -> None:
        self._closed.set()
        self._tasks.put(lambda: None)  # it need not wait for its next poll
        self._outgoing.put(None)
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.close()

    def abandon(self) -> None:
        """Close and keep the copies; delete the incomplete files of this process."""
        self.close(remove=False)
        self._directory.delete_parts(self._generation, os.getpid())

    def close_at_end(self, *, is_complete: bool) -> None:
        """Close. Keep the copies if the training is not complete, or an error ends it."""
        self.close(remove=is_complete and not _has_failed())

    def drop(self, *, is_complete: bool, is_over: bool) -> None:
        """Close without a wait, because the script has dropped its state; in any thread.

        The copies are kept for a while: the script may train again after an error.

        Args:
            is_complete: they are deleted when the process group is destroyed.
            is_over: they are deleted when the process ends.
        """
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self.is_off = True
        self._is_on_host = self._updates.drop()
        self._end_threads()
        self._directory.delete_parts(self._generation, os.getpid())
        if is_complete:
            _dropped.append(
                _DroppedCopies(self._pid, self._directory, self._generation, self._ranks, is_over)
            )


def _remove_dropped(run: str = "", *, at_exit: bool = False) -> None:
    """Delete the copies of trainings that the script has dropped, but of this run."""
    for each in list(_dropped):
        if each.directory.run == run or (at_exit and not each.is_over):
            continue
        _dropped.remove(each)
        if each.pid == os.getpid():  # and not those of the process that forked this one
            each.directory.remove(each.generation, each.ranks)


def end_dropped() -> None:
    """Delete the copies of all trainings that the script has dropped, unless it failed."""
    if not _has_failed():
        _remove_dropped()


def end_dropped_at_exit() -> None:
    """Delete those of the trainings that are over, unless the script failed."""
    if not _has_failed():
        _remove_dropped(at_exit=True)


def _has_failed() -> bool:
    """Return whether an error ends the process."""
    is_error = sys.exc_info()[1] is not None or hasattr(sys, "last_value")
    return is_error or hooks.exits_with_error()


def _answer_of(connection: PeerConnection) -> Reply:
    """Return the reply to the last message. Raises CheckpointError if it was refused."""
    reply = connection.receive()
    if not isinstance(reply, Reply):
        raise CheckpointError("a request instead of a reply")
    if reply.refusal is not None:
        raise CheckpointError(reply.refusal)
    return reply
