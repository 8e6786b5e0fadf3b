"""`resilient`: a training function that is entered again after the loss or move of a rank.

A rank of `paceline run` whose function is decorated does not end when another rank dies, nor when
the server has all ranks save and stop, to move those of one node. It leaves the function, ends what
belongs to the generation (process groups, recording, threads of `Checkpoints`), and waits. The
agent replaces the dead or moved ranks and gives all others their place in the next generation; then
the function is entered again, in the same process (ADR 19).

A rank learns in three ways that its generation is over:

- its function returns, because it has saved and stopped on command;
- its own collective fails, because a peer is gone or has left;
- the agent orders it to leave. A thread receives that. It shuts the connections of gloo down, so
  that a blocked collective fails, and raises `_Left` in the thread of the function.

What cannot leave in time is killed by the agent and replaced, as without the decorator. So nothing
here waits for a peer, and every error ends the process as it would otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import logging
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from paceline import hooks, requests
from paceline.environment import agent_directory, enter_generation, is_restarted, master
from paceline.rendezvous import wait_for_store
from paceline.session import log_once
from paceline.wrapping import replace
from paceline_wire.renewal import Enter, Leave, RankPlace, decode_order, encode, socket_address

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# For the next generation; after that the rank ends with its error. Shorter as long as the agent has
# not reported the end of a rank: a connection may have broken without one. A lost node takes 6 s.
WAIT_SECONDS = 60.0
UNORDERED_SECONDS = 15.0
_SEND_SECONDS = 5  # to connect and send to an agent that is hung or overloaded
_RAISE_SECONDS = 0.2  # between attempts to interrupt the function
# Texts of errors by which gloo and NCCL report that a peer is gone.
_LOST_PEER = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited",
)

_was_entered = False


class _Left(BaseException):
    """Raised in the function when the agent orders this rank to leave its generation."""


def resilient(function: Callable[P, T]) -> Callable[P, T]:
    """Enter the function again after the loss or move of another rank, without a new process.

    Under `paceline run`, when a rank dies, only that rank is started again; when a node is slow,
    only its ranks, on another node. The others leave the function and enter it again with the same
    arguments, as ranks of the next generation. They keep their process, their imports, compiled
    code and all that was created outside. So the function must create what belongs to a generation:
    the process group, the model and its wrapper, the optimizer, and `paceline.Checkpoints`, which
    loads the newest state that all ranks have.

    A replaced rank runs the script from its begin. So what ranks do together belongs into the
    function; only the default process group may also be created before it. An error of the
    function itself ends this rank as before; the other ranks are kept. Elsewhere (torchrun) the
    decorator only calls the function. Only the first call in a process is resilient.

    Example:
        >>> @paceline.resilient
        ... def train():
        ...     dist.init_process_group("gloo")
        ...     model = DistributedDataParallel(Model())
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     state = paceline.Checkpoints("/ckpt", model=model, optimizer=optimizer)
        ...     for batch in paceline.steps(loader, state=state):
        ...         step(batch)
    """
    _watch_groups()
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        _log.warning(
            "paceline.resilient: %s only creates a generator or coroutine when it is called, so "
            "its ranks are replaced and do not stay: decorate the function that runs it.",
            function.__qualname__,
        )

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        global _was_entered
        if _was_entered:
            return function(*args, **kwargs)
        _was_entered = True
        link = _AgentLink.open()
        if link is None:
            log_once(
                "resilient",
                "paceline.resilient: not started by `paceline run`, the function is only called",
                info=True,
            )
            return function(*args, **kwargs)
        return _Renewal(link).run(lambda: function(*args, **kwargs))

    return call


class _Renewal:
    """The calls of one function."""

    def __init__(self, link: _AgentLink) -> None:
        self._link = link
        distributed = _distributed()
        # A group that exists already is created again before the function is entered again.
        self._outer: dict[str, Any] | None = None
        if distributed is not None and distributed.is_initialized():
            self._outer = {"backend": distributed.get_backend_config()}
        self._random = _random_states()

    def run(self, function: Callable[[], T]) -> T:
        """Call the function until it returns, or ends with an error of its own."""
        _watch_groups()
        hooks.autostart()  # a later `paceline.init` adds its arguments
        if self._outer is None and is_restarted():
            _wait_for_master()
        if _distributed() is not None:
            # Optimizers and DDP import it. Its 40,000 objects would be searched at each renewal.
            with contextlib.suppress(ImportError):
                importlib.import_module("torch._dynamo")
        # Objects that exist by now stay: a collection after a renewal need not see them.
        gc.freeze()
        while True:
            error: BaseException | None = None
            results: list[T] = []
            try:
                try:
                    self._link.enter()
                    results.append(function())
                finally:
                    self._link.leave_function()
            except _Left as left:
                error = left
            except Exception as raised:
                if not is_lost_peer(raised):
                    self._link.report("outside")
                    raise
                error = raised
            else:
                if not hooks.has_stopped_on_command():
                    self._link.report("outside")
                    return results[0]
            record = self._leave(error)
            text = "" if error is None else "".join(traceback.format_exception(error))
            _forget(error)
            order = self._link.wait()
            if order is not None:
                results.clear()
                self._enter(order, record)
                continue
            self._link.report("outside")
            if error is None:
                return results[0]
            sys.exit(f"paceline: no generation followed, so this rank ends.\n{text}")

    def _leave(self, error: BaseException | None) -> Callable[[], None]:
        """Leave the generation: its process groups, recording and threads of `Checkpoints`.

        Returns what begins recording in the next one.
        """
        self._link.leave_function()
        _log.warning("This rank leaves its generation: %s", _reason(error))
        _shut_down_groups()
        record = hooks.leave()
        requests.leave()
        distributed = _distributed()
        if distributed is not None and distributed.is_initialized():
            distributed.destroy_process_group()
        self._link.report("left")
        return record

    def _enter(self, order: Enter, record: Callable[[], None]) -> None:
        """Prepare this process for the next generation."""
        enter_generation(order.environment)
        if self._random is not None:
            self._random[0].load_state_dict(self._random[1])
        record()
        _wait_for_master()
        distributed = _distributed()
        if self._outer is not None and distributed is not None:
            distributed.init_process_group(**self._outer)


class _AgentLink:
    """The connection to the agent, and the thread that receives its orders."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._thread_id = threading.get_ident()  # the thread of the function
        self._lock = threading.RLock()
        self._is_inside = False
        self._entered = 0  # how often
        self._enters: list[Enter] = []
        self._changed = threading.Event()
        self._is_ordered = False  # to leave: the agent reports the end of this generation
        self._is_broken = False
        threading.Thread(target=self._receive, name="paceline-renewal", daemon=True).start()

    @classmethod
    def open(cls) -> _AgentLink | None:
        """Connect; None if there is no agent that started this process."""
        directory = agent_directory()
        if directory is None:
            return None
        connection = socket.socket(socket.AF_UNIX)
        limit = struct.pack("ll", _SEND_SECONDS, 0)  # struct timeval
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            with socket_address(directory) as address:
                connection.connect(address)
        except OSError as error:
            connection.close()
            log_once("renewal", "paceline.resilient: no link to the agent: %s", error)
            return None
        return cls(connection)

    # In the thread of the function

    def enter(self) -> None:
        """Note that the function begins, and may be interrupted.

        Raises _Left if the generation is over already.
        """
        with self._lock:
            if self._is_ordered:
                raise _Left
            self._entered += 1
            self._is_inside = True
        self.report("inside")

    def leave_function(self) -> None:
        """Note that the function has ended: `_Left` is not raised any more."""
        while True:
            try:
                with self._lock:
                    self._is_inside = False
                    _raise_in(self._thread_id, None)
                return
            except _Left:  # raised on the way here
                continue

    def report(self, place: Literal["inside", "left", "outside"]) -> None:
        """Report where this rank is. Without an agent nothing follows from it."""
        with contextlib.suppress(OSError):
            self._connection.sendall(encode(RankPlace(place)))

    def wait(self) -> Enter | None:
        """Wait for the order to enter the next generation; None: it did not come."""
        began = time.monotonic()
        while not self._enters and not self._is_broken:
            seconds = WAIT_SECONDS if self._is_ordered else UNORDERED_SECONDS
            left = began + seconds - time.monotonic()
            if left <= 0:
                break
            self._changed.wait(left)
            self._changed.clear()
        return self._enters.pop() if self._enters else None

    # The thread

    def _receive(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    order = decode_order(line)
                    if isinstance(order, Enter):
                        self._is_ordered = False  # a later order is for the next generation
                        self._enters.append(order)
                        self._changed.set()
                    elif isinstance(order, Leave):
                        self._is_ordered = True
                        self._changed.set()
                        threading.Thread(
                            target=self._interrupt,
                            args=(self._entered,),
                            name="paceline-leave",
                            daemon=True,
                        ).start()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("The link to the agent broke: %s", error)
        finally:
            self._is_broken = True
            self._changed.set()

    def _interrupt(self, entered: int) -> None:
        """Have the function end: raise `_Left` in its thread, and fail its collectives.

        Again if it is still there, because the script may have caught the exception.
        """
        while True:
            with self._lock:
                if not self._is_inside or self._entered != entered:
                    return
                _raise_in(self._thread_id, _Left)
                _shut_down_groups()
            time.sleep(_RAISE_SECONDS)


def _raise_in(thread_id: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next line of Python; None: withdraw it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), None if kind is None else ctypes.py_object(kind)
    )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one that it followed from, reports that a peer is gone.

    Those are of torch, RuntimeErrors. A connection of the script's own may be reset, too: such as
    one to the storage of its data, an OSError.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, RuntimeError) and any(text in str(each) for text in _LOST_PEER):
            return True
        pending += [each.__cause__, each.__context__]
        failures = getattr(each, "failures", None)  # torch's CheckpointException
        if isinstance(failures, dict):
            pending += [value[0] for value in failures.values()]
    return False


def _forget(error: BaseException | None) -> None:
    """Free what the function created, before it is created again."""
    chain = error
    while chain is not None:
        if chain.__traceback__ is not None:
            traceback.clear_frames(chain.__traceback__)
            chain.__traceback__ = None
        chain = chain.__context__
    gc.collect()


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "it has saved and stopped on command"
    if isinstance(error, _Left):
        return "another rank was lost"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _distributed() -> Any | None:
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() else None


def _random_states() -> tuple[Any, dict[str, Any]] | None:
    """Return the states of the random generators, which a replaced rank has at this place, too."""
    if "torch" not in sys.modules:
        return None
    from paceline.checkpoints.random_states import RandomStates  # noqa: PLC0415 - imports torch

    states = RandomStates()
    return states, states.state_dict()


def _wait_for_master() -> None:
    if (target := master()) is not None:
        wait_for_store(*target)


# The connections of process groups on gloo, by which a blocked collective is interrupted: its
# `abort` does not end one. Descriptor and inode, because descriptors are used again.

_sockets: set[tuple[int, str]] = set()


def _watch_groups() -> None:
    """Note the connections of all process groups that are created from now on."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is not None:
        replace(module, "_new_process_group_helper", _noting_sockets)


def _noting_sockets(original: Callable[..., T]) -> Callable[..., T]:
    def create(*args: Any, **kwargs: Any) -> T:
        before = set(_open_sockets())
        try:
            return original(*args, **kwargs)
        finally:
            _sockets.update(each for each in _open_sockets() if each not in before)

    return create


def _open_sockets() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{name}")
            if inode.startswith("socket:"):
                yield int(name), inode


def _shut_down_groups() -> None:
    """Have all collectives of this process fail, in whatever thread they are."""
    global _sockets
    noted, _sockets = _sockets, set()
    for descriptor, inode in noted:
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        if os.readlink(f"/proc/self/fd/{copy}") != inode:
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as connection, contextlib.suppress(OSError):
            connection.getpeername()  # raises for a listener, which gloo uses again
            connection.shutdown(socket.SHUT_RDWR)
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = [] if module is None else list(module._world.pg_map)
    for group in groups:
        with contextlib.suppress(Exception):  # gloo has no abort that ends anything
            group.abort()
