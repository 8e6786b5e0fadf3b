"""All ranks act on a request at the same step, without a collective in steps that have none.

A request is a command on a rank's control page, or one that a rank makes itself. It reaches ranks
at different times, so they agree through the store of torch.distributed. A thread of each rank
polls the control page and the store, also while the rank trains, evaluates or waits:

1. The first rank with a request opens a *round*. Each rank sees it and posts its *limit*: the step
   that it will not go beyond before it knows the decision, at least two ahead of its own.
2. The step of the request is the greatest limit. So no rank is beyond it.
3. A rank at that step waits until all are there. The last one to arrive lets them *go*.
4. Each rank reports what came of it. The last one to report writes the *result*: done, if all are.
   To stop, ranks wait for the result.

Step, go and result are written to the store once (compare-and-set): by the rank that completes
them, or by one that calls them off. So all ranks act, or none does. A round is called off if the
server withdraws the request, a rank dies (its thread no longer beats), its loop ends before the
step while others wait there, nothing would start a rank again that the server asks to stop, or the
patience is over. Training then continues: there is no deadlock, and no rank stops alone.

Without a request a step costs one comparison. With one, ranks wait only if they reach their limit
before all have posted theirs.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from time import monotonic, sleep
from typing import Any, Protocol, TypeAlias

from paceline_wire.ring import AckStatus, Control, ControlKind

_log = logging.getLogger(__name__)

LEAD_STEPS = 2
PAGE_SECONDS = 0.05  # between polls of the control page
STORE_SECONDS = 1.0  # between polls of the store for requests of other ranks
ROUND_SECONDS = 0.02  # between polls of the store during a round
BEAT_SECONDS = 1.0
DEAD_SECONDS = 20.0  # a rank whose thread is silent for longer is dead
READERS_SECONDS = 5.0  # for all ranks to read the last result, before the process ends
ABSENT_SECONDS = 10.0  # for a rank outside its loop, once another one waits for it
PATIENCE_SECONDS = 1800.0  # to come to the step, and to save; longer than most evaluations
_OFF = b"off"
_GO = b"go"

Wanted: TypeAlias = tuple[int, int]  # kind and least step of a request
KINDS = (ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_AND_STOP, ControlKind.STOP)


@dataclass(frozen=True, slots=True)
class Request:
    """An action of all ranks after `step` completed steps."""

    kind: int  # a `ControlKind`
    step: int

    @property
    def wants_checkpoint(self) -> bool:
        return self.kind in (ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_AND_STOP)

    @property
    def wants_stop(self) -> bool:
        return self.kind in (ControlKind.STOP, ControlKind.CHECKPOINT_AND_STOP)


class RankStore(Protocol):
    """The methods of a store of torch.distributed that are used; none of them waits."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...


class _Phase(Enum):
    IDLE = 0
    OPEN = 1  # this rank's limit is posted
    DECIDED = 2  # the step is known
    GO = 3  # all ranks are at the step, and act


class Agreement:
    """One rank's side of the agreement. Steps are numbers of completed steps."""

    def __init__(
        self,
        store: RankStore | None,
        rank: int,
        world_size: int,
        pending: Callable[[], Control | None],
        acknowledge: Callable[[int, int, int], object],
        *,
        obstacle_to_stop: Callable[[], str | None] = lambda: None,
        dead_seconds: float = DEAD_SECONDS,
        absent_seconds: float = ABSENT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Start the thread.

        Args:
            store: of the process group, with a connection of its own; None for one rank.
            rank: of this process.
            world_size: number of ranks.
            pending: returns the command on the control page.
            acknowledge: answers a command, with its id, an `AckStatus` and a step.
            obstacle_to_stop: returns why the ranks must not stop on a command; None: they may.
            dead_seconds: a rank whose thread is silent for longer is dead.
            absent_seconds: how long others wait at the step for a rank outside its loop.
            patience_seconds: longest time to come to the step, and to act on the request.
        """
        self.step: int | None = None  # completed by this rank; None: not in its loop yet
        self.is_inside = False  # the loop
        self._store = store
        self.rank = rank
        self._size = world_size
        self._pending = pending
        self._acknowledge = acknowledge
        self._obstacle_to_stop = obstacle_to_stop
        self._dead_seconds = dead_seconds
        self._absent_seconds = absent_seconds
        self._patience_seconds = patience_seconds
        self._limit: int | None = None  # the step at which to wait
        self._changed = threading.Condition()  # with a lock that may be taken again
        self._state = _Phase.IDLE
        self._request: Request | None = None  # this round's; its step is a lower bound until then
        self._key: Wanted = (0, 0)  # this round's
        self._command: int | None = None  # id of this rank's command for the round
        self._has_arrived = False
        self._report: bool | None = None  # what came of the request on this rank
        self._result: bool | None = None  # on all ranks
        self._has_read = False  # the result of the last round, in the store
        self._own: dict[int, int] = {}  # kinds that this rank requests by itself, and their steps
        self._round = 0  # number of the last one
        self._answers: dict[Wanted, tuple[int, int]] = {}  # to requests that are over
        self._newest = 0  # id of the newest command that was answered
        self._next_look = 0.0  # at the store
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-agreement", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # Called by the training thread

    def at(self, step: int) -> Request | None:
        """Return the request to act on now, after `step` completed steps.

        Waits only if a request is being agreed on and other ranks are behind.
        """
        self.step = step
        self.is_inside = True
        limit = self._limit
        if limit is None or step < limit:
            return None
        return self._wait(step)

    def leave(self) -> None:
        """Note that the loop ended; `at` enters it again."""
        self.is_inside = False

    def request(self, kind: int, step: int = 0) -> None:
        """Request a `ControlKind` of all ranks, not before `step`.

        Any thread and signal handler may call it.
        """
        self._own[kind] = step

    def report(self, request: Request, done: bool) -> None:
        """Report what came of the request that `at` returned on this rank. It does not wait."""
        with self._changed:
            if self._request is request and self._report is None:
                self._report = done

    def result(self, request: Request) -> bool:
        """Return whether all ranks stop now: it was requested, and done by all of them.

        Waits until all have reported; all ranks call it at the same place of their loops.
        """
        with self._changed:
            while self._request is request and request.wants_stop and self._thread.is_alive():
                self._changed.wait(1.0)
            is_over = self._request is not request
            return request.wants_stop and is_over and bool(self._result)

    def finish(self, request: Request, done: bool) -> bool:
        """Report, and return the result."""
        self.report(request, done)
        return self.result(request)

    def close(self) -> None:
        """End the thread; call a round off that is not complete."""
        self._is_closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        atexit.unregister(self.close)

    def _wait(self, step: int) -> Request | None:
        with self._changed:
            while self._limit is not None and step >= self._limit:
                if self._state is _Phase.GO:
                    self._limit = None
                    assert self._request is not None, "a round is complete"
                    self._request = Request(self._request.kind, step)
                    return self._request
                if self._state is _Phase.DECIDED:
                    self._has_arrived = True
                if not self._thread.is_alive():
                    self._forget()
                self._changed.wait(1.0)
        return None

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_closed.wait(PAGE_SECONDS):
                self._poll()
            self._wait_for_readers()
        except Exception as error:
            # The store is gone: so is its host, and the job with it.
            _log.debug("requests are no longer agreed on: %s", error)
        finally:
            with self._changed:
                self._forget()

    def _wait_for_readers(self) -> None:
        """Wait until all ranks have read the last result: one of them may host the store."""
        until = monotonic() + READERS_SECONDS
        if self._store is not None and self._has_read:
            while self._store.add(self._name("read"), 0) < self._size and monotonic() < until:
                sleep(ROUND_SECONDS)

    def _poll(self) -> None:
        if self._state is not _Phase.IDLE:
            self._act_alone()
            return
        wanted = self._wanted()
        if self.step is None:
            return
        if self._store is None:
            if wanted is not None:
                self._begin_round(wanted, 1, _Phase.GO)
        elif wanted is not None or self._is_time_to_look():
            self._join_round(self._store, wanted)

    def _act_alone(self) -> None:
        """End the round of a single rank once it is over."""
        with self._changed:
            if self._report is not None and self._request is not None:
                self._end(self._report, self._request.step)
            elif self._is_withdrawn():
                self._end(False, self.step or 0)

    def _is_time_to_look(self) -> bool:
        now = monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + STORE_SECONDS
        return True

    def _wanted(self) -> Wanted | None:
        """Return kind and least step of a request that this rank has; answer one that is over."""
        command = self._pending()
        if command is not None and command.command_id > self._newest:
            if command.kind == ControlKind.CANCEL:
                self._answers.clear()
                self._answer(command.command_id, AckStatus.DONE, self.step or 0)
            elif command.kind not in KINDS:
                self._answer(command.command_id, AckStatus.FAILED, self.step or 0)
            else:
                key = (command.kind, command.target_step)
                over = self._answers.get(key)
                if over is None:
                    return key
                self._answer(command.command_id, *over)
        return max([*self._own.items()], default=None)  # to stop comes before to go on

    def _answer(self, command_id: int, status: int, step: int) -> None:
        with self._changed:
            self._newest = max(self._newest, command_id)
            self._acknowledge(command_id, status, step)

    def _is_withdrawn(self) -> bool:
        command = self._pending()
        is_new = command is not None and command.command_id > self._newest
        return is_new and command is not None and command.kind == ControlKind.CANCEL

    def _command_of(self, key: Wanted) -> int | None:
        """Return the id of this rank's command if it is this request."""
        command = self._pending()
        is_it = command is not None and (command.kind, command.target_step) == key
        return command.command_id if command is not None and is_it else None

    def _bind_command(self) -> None:
        """Remember this rank's command for the round, once it is on the control page."""
        self._command = self._command_of(self._key) or self._command

    # A round

    def _begin_round(
        self, key: Wanted, lead: int, state: _Phase, command_id: int | None = None
    ) -> int:
        """Begin a round on this rank. Return the step that it will not go beyond.

        `command_id`: of the rank that opened the round; answered if this rank has no command.
        """
        with self._changed:
            self._round += 1
            self._key, self._command, self._has_arrived = key, command_id, False
            self._report = self._result = None
            self._has_read = False
            if self._own.get(key[0]) == key[1]:
                del self._own[key[0]]
            self._state = state
            self._bind_command()
        while True:
            assert self.step is not None, "checked before"
            limit = max(key[1], self.step + lead)
            with self._changed:
                self._request, self._limit = Request(key[0], limit), limit
                self._changed.notify_all()
            if self.step < limit:  # the training thread will see the limit before it is there
                return limit

    def _join_round(self, store: RankStore, wanted: Wanted | None) -> None:
        name = f"{self._round + 1}/request"
        if wanted is not None:
            command_id = self._command_of(wanted) or 0
            text = store.compare_set(name, "", f"{wanted[0]} {wanted[1]} {command_id}").decode()
        elif store.check([name]):
            text = store.get(name).decode()
        else:
            return
        kind, least, command_id = map(int, text.split())
        limit = self._begin_round((kind, least), LEAD_STEPS, _Phase.OPEN, command_id or None)
        store.set(self._name(f"limit/{self.rank}"), str(limit))
        if store.add(self._name("seen"), 1) == self._size:
            keys = [self._name(f"limit/{rank}") for rank in range(self._size)]
            greatest = max(int(each) for each in store.multi_get(keys))
            store.compare_set(self._name("step"), "", str(greatest))
        neighbor = _Neighbor(store, self._name("beat"), self.rank, self._size, self._dead_seconds)
        round_ = _Round(monotonic(), neighbor)
        while self._state is not _Phase.IDLE:
            self._advance(store, round_)
            reason = self._trouble(store, round_)
            if reason is not None:
                self._call_off(store, reason)
            else:
                self._is_closed.wait(ROUND_SECONDS)

    def _advance(self, store: RankStore, round_: _Round) -> None:
        """Follow the store, and write what this rank contributes."""
        if self._state is _Phase.OPEN and store.check([self._name("step")]):
            self._decide(store.get(self._name("step")))
        if self._state is _Phase.DECIDED and self._has_arrived and not round_.has_arrived:
            round_.has_arrived = True
            self._complete(store, "arrived", "go")
        if self._state is _Phase.DECIDED and store.check([self._name("go")]):
            self._let_go(store.get(self._name("go")))
            round_.began = monotonic()
        if self._state is _Phase.GO and self._report is not None and not round_.has_reported:
            round_.has_reported = True
            if self._report:
                self._complete(store, "done", "result")
            else:
                store.compare_set(self._name("result"), "", _OFF.decode())
        if self._state is _Phase.GO and store.check([self._name("result")]):
            self._conclude(store, store.get(self._name("result")))

    def _complete(self, store: RankStore, count: str, key: str) -> None:
        """Count this rank; the last one writes the key."""
        if store.add(self._name(count), 1) == self._size:
            store.compare_set(self._name(key), "", _GO.decode())

    def _trouble(self, store: RankStore, round_: _Round) -> str | None:
        """Return why the round has to be called off; None: it continues."""
        now = monotonic()
        is_absent = not self.is_inside and not round_.has_arrived and self._state is _Phase.DECIDED
        if not is_absent or not store.check([self._name("arrived")]):
            round_.absent_since = None
        elif round_.absent_since is None:
            round_.absent_since = now
        absent_since = round_.absent_since
        if self._is_closed.is_set():
            return "the training ends"
        if round_.neighbor.is_dead(now):
            return f"rank {round_.neighbor.rank} does not respond"
        if now - round_.began > self._patience_seconds:
            return "it took too long"
        if self._is_withdrawn():
            return "it was withdrawn"
        request = self._request
        if request is not None and request.wants_stop and self._command is not None:
            obstacle = self._obstacle_to_stop()
            if obstacle is not None:
                return obstacle
        if self._state is _Phase.GO:
            return None
        if absent_since is not None and now - absent_since > self._absent_seconds:
            return f"the loop of rank {self.rank} ended before the agreed step"
        return None

    def _decide(self, decision: bytes) -> None:
        with self._changed:
            if decision == _OFF:
                self._end(False, self.step or 0)
                return
            assert self._request is not None, "a round is open"
            step = int(decision)
            self._request = Request(self._request.kind, step)
            self._state, self._limit = _Phase.DECIDED, step
            self._changed.notify_all()
            self._bind_command()
            if self._command is not None:
                self._acknowledge(self._command, AckStatus.SEEN, step)

    def _let_go(self, decision: bytes) -> None:
        with self._changed:
            if decision == _OFF:
                self._end(False, self.step or 0)
            else:
                self._state = _Phase.GO
                self._changed.notify_all()

    def _conclude(self, store: RankStore, decision: bytes) -> None:
        store.add(self._name("read"), 1)
        self._has_read = True
        with self._changed:
            assert self._request is not None, "a round is open"
            self._end(decision != _OFF, self._request.step)

    def _call_off(self, store: RankStore, reason: str) -> None:
        """Call the round off, unless it is complete; the others learn it from the store."""
        if self._state is _Phase.OPEN:
            self._decide(self._set_off(store, "step", reason))
        if self._state is _Phase.DECIDED:
            self._let_go(self._set_off(store, "go", reason))
        if self._state is _Phase.GO:
            self._conclude(store, self._set_off(store, "result", reason))

    def _set_off(self, store: RankStore, key: str, reason: str) -> bytes:
        decision = store.compare_set(self._name(key), "", _OFF.decode())
        if decision == _OFF:
            _log.warning("A request to all ranks was called off: %s.", reason)
        return decision

    def _end(self, done: bool, step: int) -> None:
        """End the round on this rank: remember and send its answer. The lock is held."""
        status = AckStatus.DONE if done else AckStatus.FAILED
        self._answers[self._key] = (status, step)
        self._bind_command()
        if self._command is not None:
            self._answer(self._command, status, step)
        self._result = done
        self._forget()

    def _forget(self) -> None:
        self._request = self._limit = None
        self._state = _Phase.IDLE
        self._changed.notify_all()

    def _name(self, key: str) -> str:
        return f"{self._round}/{key}"


@dataclass(slots=True)
class _Round:
    """The progress of one round, in the thread."""

    began: float  # the round, or to act on the request
    neighbor: _Neighbor
    has_arrived: bool = False  # written to the store
    has_reported: bool = False  # written to the store
    absent_since: float | None = None  # since when others wait for this rank outside its loop


class _Neighbor:
    """The beats of this rank's thread, and those of the next rank.

    Each rank watches one other, so that a large job does not load the store.
    """

    def __init__(
        self, store: RankStore, prefix: str, rank: int, world_size: int, dead_seconds: float
    ) -> None:
        self.rank = (rank + 1) % world_size
        self._store = store
        self._own = f"{prefix}/{rank}"
        self._watched = f"{prefix}/{self.rank}"
        self._dead_seconds = dead_seconds
        self._next = 0.0
        self._beats = 0
        self._last: bytes | None = None
        self._since: float | None = None

    def is_dead(self, now: float) -> bool:
        """Beat. Return whether the watched rank no longer does."""
        if now >= self._next:
            self._next = now + BEAT_SECONDS
            self._beats += 1
            self._store.set(self._own, str(self._beats))
            is_there = self._store.check([self._watched])
            beat = self._store.get(self._watched) if is_there else None
            if beat != self._last or self._since is None:
                self._last, self._since = beat, now
        return self._since is not None and now - self._since > self._dead_seconds


def store_of_process_group(torch_distributed: Any, prefix: str) -> Any | None:
    """Return a store of the default process group with a connection of its own; None for one rank.

    `prefix`: of its keys, below Paceline's.

    Raises RuntimeError if the store cannot be used from a second thread.
    """
    if not torch_distributed.is_initialized() or torch_distributed.get_world_size() == 1:
        return None
    default = torch_distributed.distributed_c10d._get_default_store()
    return torch_distributed.PrefixStore(f"paceline/{prefix}", default.clone())
