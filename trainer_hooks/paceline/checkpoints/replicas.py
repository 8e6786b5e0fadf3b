"""Comparison of replicas: the ranks that should have the same parameters still have them.

A bit that flips in the memory of one rank changes its parameters without any error, and through the
gradients all others. So each K steps every rank takes a checksum of one piece of its parameters,
the same piece on all replicas, and a thread compares it with those of the others through the store
of torch.distributed: no collective, no wait in the loop.

Replicas are the ranks of a `DistributedDataParallel`, and for a DTensor the ranks of its mesh that
differ only in dimensions in which it is replicated. Shards are compared with the same shard only.
Buffers and other tensors may differ between ranks, and are not compared. A flipped bit is in one of
them: if groups of them differ, each trains alone for a while (local SGD). Of two ranks, one is
damaged if only one piece differs: gradients that both share change the others alike.

K is the smallest power of two, from `LEAST_EVERY` on, with which the checksum takes at most
`OVERHEAD` of the step time. Ranks may have different ones: a step counts for those that checked it.
It is compared once all ranks have posted a checksum of it or of a later step.
On a GPU the checksum is queued on the current stream and copied without a wait; the thread
reads it once the GPU has set a mark.
"""

from __future__ import annotations

import hashlib
import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.agreement import RankStore
from paceline.checkpoints.device_mark import DeviceMark

_log = logging.getLogger(__name__)

OVERHEAD = 0.001
LEAST_EVERY = 8
MOST_EVERY = 1 << 20
PIECE_BYTES = 1 << 18
WAIT_SECONDS = 60.0  # for the checksums of the other replicas
_SLOTS = 61  # steps that are kept in the store; a prime, so that multiples of any K have all
_POLL_SECONDS = 0.2
_WARMUP_CHECKS = 2  # whose times are not measured: they allocate
_PIECES_ALIKE = 2  # checks in a row of other pieces that agree, before one of two ranks is damaged


class Mismatch(msgspec.Struct, frozen=True):
    """Replicas whose parameters differ, for the server."""

    step: int  # completed steps
    agreed_step: int | None  # when all had the same content of this piece; None: not checked before
    tensor: str
    ranks: list[int]  # compared
    outliers: list[int]  # that differ from the majority; empty without one


class Piece(NamedTuple):
    """A part of a parameter's local content."""

    name: str
    parameter: Tensor
    begin: int  # in bytes
    end: int


class ReplicaSet(NamedTuple):
    """Ranks with the same content, and that content of this rank in pieces."""

    ranks: tuple[int, ...]
    pieces: list[Piece]

    @property
    def name(self) -> str:
        """The same on all of its ranks, and of no other set."""
        return hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]

    def piece(self, step: int) -> int:
        """Return the number of the piece to check after a step: the same on all ranks."""
        # A multiplicative hash (Knuth) spreads the multiples of K over all pieces.
        mixed = (step * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        return (mixed >> 20) % len(self.pieces)


def replica_sets(modules: Sequence[nn.Module]) -> list[ReplicaSet]:
    """Return the sets that this rank belongs to, in the same order on all of their ranks."""
    found: dict[tuple[int, ...], list[Piece]] = {}
    for number, module in enumerate(modules):
        replicated = {
            id(parameter): tuple(dist.get_process_group_ranks(each.process_group))
            for each in module.modules()
            if isinstance(each, DistributedDataParallel)
            for name, parameter in each.module.named_parameters()
            if name not in each.parameters_to_ignore  # such as experts, or shards of a table
        }
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                ranks = _ranks_of(parameter)
            else:
                ranks = replicated.get(id(parameter), ())
            if len(ranks) > 1:
                pieces = found.setdefault(tuple(sorted(ranks)), [])
                pieces += _pieces(f"{number}.{name}", parameter)
    return [ReplicaSet(ranks, pieces) for ranks, pieces in sorted(found.items()) if pieces]


def _ranks_of(parameter: DTensor) -> tuple[int, ...]:
    """Return the ranks with the same shard as this one."""
    mesh = parameter.device_mesh
    own = mesh.get_coordinate()
    if own is None:
        return ()
    index = tuple(
        slice(None) if placement.is_replicate() else coordinate
        for placement, coordinate in zip(parameter.placements, own, strict=True)
    )
    return tuple(int(rank) for rank in mesh.mesh[index].flatten().tolist())


def _pieces(name: str, parameter: Tensor) -> Iterator[Piece]:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    size = local.numel() * local.element_size()
    for begin in range(0, size, PIECE_BYTES):
        yield Piece(name, parameter, begin, min(begin + PIECE_BYTES, size))


def checksum(piece: Piece, weights: dict[tuple[int, torch.device], Tensor]) -> Tensor:
    """Return a checksum of the piece as a tensor of one element, on its device.

    The sum of the 32-bit words, each multiplied by 2 x its place + 1, modulo 2^64. Any
    change of one word changes it.
    """
    with torch.no_grad():
        parameter = piece.parameter
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        content = local.detach().contiguous().flatten().view(torch.uint8)
        content = content[piece.begin : piece.end]
        if piece.end % 4 or piece.begin % 4 or content.storage_offset() % 4:
            words = content.to(torch.int64)
        else:
            words = content.view(torch.int32).to(torch.int64)
        key = words.numel(), words.device
        if key not in weights:
            weights[key] = 2 * torch.arange(words.numel(), device=words.device) + 1
        return (words * weights[key]).sum()


class _Taken(NamedTuple):
    """A checksum of this rank, or the mark after which it can be read."""

    number: int  # number of the set
    step: int
    piece: int
    value: Tensor
    mark: DeviceMark | None


class _Suspicion:
    """A difference of two ranks that is not reported yet; how many other pieces agreed since."""

    def __init__(self, piece: int, mismatch: Mismatch) -> None:
        self.piece = piece
        self.mismatch = mismatch
        self.pieces_alike = 0


class ReplicaCheck:
    """Compares the replicas of this rank's parameters."""

    def __init__(
        self,
        sets: Sequence[ReplicaSet],
        rank: int,
        store: RankStore,
        *,
        overhead: float = OVERHEAD,
        least_every: int = LEAST_EVERY,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Start the thread. `store`: with a connection of its own; `rank`: in the default group."""
        self.every = least_every
        self.mismatches: queue.SimpleQueue[Mismatch] = queue.SimpleQueue()
        self._sets = list(sets)
        self._names = [one.name for one in sets]
        self._rank = rank
        self._store = store
        self._overhead = overhead
        self._least_every = least_every
        self._clock = clock
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._queue: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._off: set[int] = set()  # sets with a mismatch, or that are no replicas
        self._agreed: dict[tuple[int, int], int] = {}  # by set and piece: step
        self._suspicions: dict[int, _Suspicion] = {}  # by number of the set
        self._last: tuple[int, float] | None = None  # step and time of the last check
        self._step_seconds = math.inf
        self._checks = 0
        self._cost_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="paceline-replicas", daemon=True)
        self._thread.start()

    # In the loop

    def step_ended(self, step: int) -> None:
        """Take the checksums if it is time. `step`: completed steps, the same on all ranks."""
        if step % self.every:
            return
        begun = self._clock()
        if self._last is not None and step > self._last[0]:
            seconds = (begun - self._last[1]) / (step - self._last[0])
            before = self._step_seconds
            self._step_seconds = seconds if math.isinf(before) else 0.5 * before + 0.5 * seconds
        for number, one in enumerate(self._sets):
            if number not in self._off:
                self._queue.put(self._take(number, step, one))
        ended = self._clock()
        self._measure(ended - begun)
        self._last = step, ended

    def _take(self, number: int, step: int, one: ReplicaSet) -> _Taken:
        piece = one.piece(step)
        value = checksum(one.pieces[piece], self._weights)
        mark = None
        if value.is_cuda:
            device = value.device
            target = torch.empty((), dtype=torch.int64, pin_memory=True)
            value = target.copy_(value, non_blocking=True)
            mark = DeviceMark(device)  # the script may have another one as its current device
        return _Taken(number, step, piece, value, mark)

    def _measure(self, seconds: float) -> None:
        self._checks += 1
        if self._checks <= _WARMUP_CHECKS:
            return
        before = self._cost_seconds
        self._cost_seconds = seconds if not before else 0.8 * before + 0.2 * seconds
        # At half of what is allowed, checksums that take longer than usual stay within it.
        needed = 2.0 * self._cost_seconds / (self._overhead * self._step_seconds)
        every = self._least_every
        while every < needed and every < MOST_EVERY:
            every *= 2
        self.every = every

    def end(self) -> None:
        """Have the thread end; it does not wait for other ranks."""
        self._queue.put(None)

    def close(self) -> None:
        """End the thread."""
        self.end()
        self._thread.join(5.0)

    # In the thread

    def _run(self) -> None:
        waiting: list[tuple[float, _Taken]] = []
        look_at = 0.0
        try:
            while True:
                try:
                    taken = self._queue.get(timeout=_POLL_SECONDS if waiting else None)
                    if taken is None:
                        return
                    self._post(taken)
                    if self._rank == self._sets[taken.number].ranks[0]:
                        waiting.append((monotonic() + WAIT_SECONDS, taken))
                except queue.Empty:
                    pass
                if waiting and monotonic() >= look_at:
                    waiting = self._compare_posted(waiting)
                    look_at = monotonic() + _POLL_SECONDS
        except Exception as error:  # the store is gone, or a device error that the script sees too
            _log.warning("Replicas are no longer compared: %s", error)
            self._off.update(range(len(self._sets)))

    def _post(self, taken: _Taken) -> None:
        mark = taken.mark
        while mark is not None and not mark.is_reached:
            threading.Event().wait(0.01)
        value = int(taken.value) & 0xFFFFFFFFFFFFFFFF
        self._store.set(self._key(taken, self._rank), f"{taken.step}:{value:016x}")
        self._store.set(self._newest_key(taken.number, self._rank), str(taken.step))

    def _key(self, taken: _Taken, rank: int) -> str:
        slot = taken.step // self._least_every % _SLOTS
        return f"{self._names[taken.number]}/{slot}/{rank}"

    def _newest_key(self, number: int, rank: int) -> str:
        return f"{self._names[number]}/newest/{rank}"

    def _compare_posted(self, waiting: list[tuple[float, _Taken]]) -> list[tuple[float, _Taken]]:
        """Compare the steps of which no more checksums are expected. Return the others."""
        passed = {
            number: self._passed_step(number) for number in {one.number for _, one in waiting}
        }
        left = []
        for deadline, taken in waiting:
            if taken.number in self._off:
                continue
            if taken.step > passed[taken.number] and monotonic() < deadline:
                left.append((deadline, taken))
            else:
                self._compare(taken)
        return left

    def _passed_step(self, number: int) -> int:
        """Return the newest step for which all ranks of a set have posted theirs, if they do."""
        keys = [self._newest_key(number, rank) for rank in self._sets[number].ranks]
        if not self._store.check(keys):
            return -1
        return min(int(step) for step in self._store.multi_get(keys))

    def _compare(self, taken: _Taken) -> None:
        """Compare the checksums of a step."""
        ranks = self._sets[taken.number].ranks
        keys = {rank: self._key(taken, rank) for rank in ranks}
        if not self._store.check(list(keys.values())):  # a rank has not posted there yet
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        found = {}
        for rank, posted in zip(keys, self._store.multi_get(list(keys.values())), strict=True):
            step, _, value = posted.decode().partition(":")
            if int(step) == taken.step:
                found[rank] = value
        if len(found) > 1:
            self._judge(taken, found)

    def _judge(self, taken: _Taken, found: dict[int, str]) -> None:
        counts = Counter(found.values())
        suspicion = self._suspicions.get(taken.number)
        if len(counts) == 1:
            self._agreed[taken.number, taken.piece] = taken.step
            if suspicion is not None and suspicion.piece == taken.piece:
                del self._suspicions[taken.number]
            elif suspicion is not None:
                suspicion.pieces_alike += 1
                if suspicion.pieces_alike == _PIECES_ALIKE:
                    self._report(taken.number, suspicion.mismatch)
            return
        if not any(number == taken.number for number, _ in self._agreed):
            self._stop(taken.number, f"Ranks {sorted(found)} never had the same parameters")
            return
        (value, count), *_ = counts.most_common(1)
        has_majority = len(found) > 2 and 2 * count > len(found)
        groups_differ = len(found) > 2 and not has_majority
        if groups_differ or (suspicion is not None and suspicion.piece != taken.piece):
            self._stop(taken.number, "Parameters differ between ranks, as with local SGD")
            return
        outliers = [rank for rank, own in found.items() if own != value] if has_majority else []
        pieces = self._sets[taken.number].pieces
        agreed_step = self._agreed.get((taken.number, taken.piece))
        mismatch = Mismatch(
            taken.step, agreed_step, pieces[taken.piece].name, sorted(found), outliers
        )
        if has_majority or len(pieces) == 1:
            self._report(taken.number, mismatch)
        elif suspicion is None:
            self._suspicions[taken.number] = _Suspicion(taken.piece, mismatch)
        else:
            suspicion.pieces_alike = 0

    def _report(self, number: int, mismatch: Mismatch) -> None:
        self._off.add(number)
        _log.error("Replicas differ: %s", mismatch)
        self.mismatches.put(mismatch)

    def _stop(self, number: int, why: str) -> None:
        self._off.add(number)
        _log.info("%s: not compared.", why)
