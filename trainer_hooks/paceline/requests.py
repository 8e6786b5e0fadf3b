"""Requests of the server to a script: `should_checkpoint`, `should_stop`, and `steps(save=...)`.

A process has one `Agreement`. Its user is a `Checkpoints`, or the script itself, which calls the
two functions once per step. A checkpoint that the script was asked for counts as done at its
`checkpoint_saved`, or when it calls one of the two functions again: ranks that save nothing
themselves report so. An asynchronous save that was recognized is waited for.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import ismethod
from typing import Any, TypeAlias
from weakref import WeakMethod, ref

from paceline import hooks
from paceline.agreement import Agreement, Request, store_of_process_group
from paceline.environment import launched_world_size, lost_torchrun
from paceline.session import log_once
from paceline.wrapping import replace_everywhere

_agreement: Agreement | None = None
_Call: TypeAlias = Callable[[], object]
# Called before the process group is destroyed, when this rank leaves its generation, and when the
# process ends: methods of objects that the script has not dropped, and functions.
_before_end: list[ref[_Call]] = []
_at_leave: list[ref[_Call]] = []
_at_exit: list[ref[_Call]] = []
_is_unavailable = False


class RequestDriver:
    """The state of an object that acts on requests instead of the script."""

    def __init__(self) -> None:
        self.stopped = False  # all ranks ended their loops on request


_driver: RequestDriver | None = None


def drive(driver: RequestDriver) -> Agreement | None:
    """Have `driver` act on the requests from now on. Return the agreement, if there is one."""
    global _driver
    _driver = driver
    hooks.declare(checkpoint=True, stop=True)
    return agreement()


def agreement() -> Agreement | None:
    """Return this process's side of the agreement; None before the process group exists."""
    global _agreement, _is_unavailable
    if _agreement is None and not _is_unavailable:
        distributed = sys.modules.get("torch.distributed")
        is_ready = distributed is not None and distributed.is_available()
        is_ready = is_ready and distributed.is_initialized()  # type: ignore[union-attr]
        if not is_ready and launched_world_size() > 1:
            return None
        try:
            store = store_of_process_group(distributed, "agreement") if is_ready else None
            rank = distributed.get_rank() if is_ready else 0  # type: ignore[union-attr]
            size = distributed.get_world_size() if is_ready else 1  # type: ignore[union-attr]
            _agreement = Agreement(
                store,
                rank,
                size,
                hooks.pending,
                hooks.acknowledge,
                obstacle_to_stop=lost_torchrun,
            )
            _watch_end()
        except Exception as error:  # a store that cannot be cloned
            _is_unavailable = True
            log_once("agreement", "paceline: requests are not agreed on: %s", error)
    return _agreement


def before_end(call: _Call) -> None:
    """Have `call` run before the process group is destroyed, unless its object is gone by then."""
    _add(_before_end, call)
    _watch_end()


def at_leave(call: _Call) -> None:
    """Have `call` run when this rank leaves its generation, unless its object is gone by then."""
    _add(_at_leave, call)


def at_exit(call: _Call) -> None:
    """Have `call` run when the process ends, unless its object is gone by then."""
    _add(_at_exit, call)
    atexit.unregister(_exiting)
    atexit.register(_exiting)


def _exiting() -> None:
    _call_all(_at_exit)


def _add(calls: list[ref[_Call]], call: _Call) -> None:
    added: ref[_Call] = WeakMethod(call) if ismethod(call) else ref(call)
    calls[:] = [each for each in calls if each() is not None and each != added] + [added]


def _watch_end() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        replace_everywhere(distributed, "destroy_process_group", _closing)


def close_agreement() -> None:
    """End the agreement: the process group ends. A later one begins another."""
    global _agreement
    if _agreement is not None:
        _agreement.close()
        _agreement = None


def leave() -> None:
    """Forget all that belongs to this generation. It waits for no other rank."""
    global _driver, _script
    _call_all(_at_leave)
    _before_end.clear()
    close_agreement()
    _driver, _script = None, _Script()


def _call_all(calls: list[ref[_Call]]) -> None:
    """Call them once; an error of one is logged, and the others follow."""
    for reference in calls:
        try:
            if (call := reference()) is not None:
                call()
        except Exception as error:
            log_once("end", "paceline: a Checkpoints was not ended completely: %s", error)
    calls.clear()


def _closing(original: object) -> object:
    def destroy_process_group(group: object = None) -> object:
        if group is None or group is getattr(sys.modules["torch.distributed"].group, "WORLD", None):
            _call_all(_before_end)
            close_agreement()
        return original(group)  # type: ignore[operator]

    return destroy_process_group


class _Script:
    """The state of a script that acts on requests itself."""

    def __init__(self) -> None:
        self.due: Request | None = None
        self.is_asked = False  # `should_checkpoint` returned True for it
        self.is_saving = False  # inside the function that saves; it may save more than a framework
        self.is_stopping = False
        self.can_checkpoint = False
        self.can_stop = False

    def update(self, step: int | None) -> None:
        """Take the request of this step; end the one that the script has acted on."""
        if self.due is not None and self.is_asked:
            self.finish()
        own = agreement()
        step = hooks.completed_steps() if step is None else hooks.recorded_step(step)
        if self.due is None and own is not None and step is not None and not self.is_stopping:
            self.due = own.at(step)
            self.is_asked = False

    def ask(self, step: int | None) -> Request | None:
        """Return the request for a checkpoint that the script has to save now."""
        self.update(step)
        due = self.due
        if due is None or not due.wants_checkpoint:
            return None
        self.is_asked = True
        hooks.forget_saves()  # an earlier one may have failed
        return due

    def report(self, done: bool) -> None:
        """Report what came of the request on this rank; the first report counts."""
        if self.due is not None and _agreement is not None:
            _agreement.report(self.due, done)

    def finish(self) -> None:
        """End the request, and learn whether all ranks stop."""
        request, self.due = self.due, None
        if request is not None and _agreement is not None:
            done = hooks.wait_for_saves() if self.is_asked else not request.wants_checkpoint
            self.is_stopping = _agreement.finish(request, done)

    def declare(
        self, *, checkpoint: bool = False, stop: bool = False, reports: bool = False
    ) -> None:
        """Declare what the script can do, at its first call.

        `reports`: it reports its checkpoints, so that none has to be recognized.
        """
        if checkpoint > self.can_checkpoint or stop > self.can_stop:
            self.can_checkpoint |= checkpoint
            self.can_stop |= stop
            declare = hooks.declare if reports else hooks.declare_abilities
            declare(checkpoint=self.can_checkpoint, stop=self.can_stop)


_script = _Script()


def should_checkpoint(step: int | None = None) -> bool:
    """Return whether to save a checkpoint now: True on all ranks at the same step.

    Call it once per step, at the same place on all ranks. After saving, call
    `paceline.checkpoint_saved(step)`. Without a request it costs a few microseconds.

    Args:
        step: number of completed steps; default: as Paceline counts them.

    Example:
        >>> if paceline.should_checkpoint():
        ...     torch.save(model.state_dict(), path)
        ...     paceline.checkpoint_saved(step)
    """
    if _driver is not None:
        return False
    return _is_checkpoint_due(step, reports=True)


def framework_should_checkpoint() -> bool:
    """Return what `should_checkpoint` does, for a framework whose saves are recognized."""
    return _is_checkpoint_due(None, reports=False)


def _is_checkpoint_due(step: int | None, *, reports: bool) -> bool:
    try:
        _script.declare(checkpoint=True, reports=reports)
        return _script.ask(step) is not None
    except Exception as error:
        log_once("should_checkpoint", "paceline.should_checkpoint failed: %s", error)
        return False


def should_stop(step: int | None = None) -> bool:
    """Return whether to end the loop now: True on all ranks from the same step on.

    A request for a checkpoint and a stop is True here once the checkpoint is saved. If that failed
    (`paceline.checkpoint_failed`), training continues.

    Args:
        step: number of completed steps; default: as Paceline counts them.

    Example:
        >>> if paceline.should_stop():
        ...     break
    """
    if _driver is not None:
        return _driver.stopped
    try:
        _script.declare(stop=True)
        _script.update(step)
        due = _script.due
        if due is not None and (not due.wants_checkpoint or not _script.can_checkpoint):
            _script.finish()
        return _script.is_stopping
    except Exception as error:
        log_once("should_stop", "paceline.should_stop failed: %s", error)
        return False


def _on_checkpoint(saved: bool) -> None:
    """Note that the script or its framework reported a checkpoint, or that it failed."""
    if _script.is_asked and not (saved and _script.is_saving):
        _script.report(saved)


class _ScriptLoop:
    """The state of a loop whose script gives `steps` the function that saves."""

    step: int | None = None  # the loop counts

    def __init__(self, save: Callable[[int], object]) -> None:
        self._save = save
        self._taken = False  # a batch, since the last boundary

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch; without a batch after a request to stop."""
        _script.declare(checkpoint=True, stop=True)
        self._taken = False
        return iter(()) if _script.is_stopping else iter(loader)

    def took(self) -> None:
        """Note that a batch was taken."""
        self._taken = True

    def boundary(self) -> bool:
        """Save on request. Return whether the loop ends on request."""
        if not self._taken or _driver is not None:
            return False
        self._taken = False
        request = None
        try:
            request = _script.ask(None)
        except Exception as error:
            log_once("steps", "paceline.steps: requests are not followed: %s", error)
        if request is not None:
            with hooks.checkpoint():
                self._save_at(request.step)
        return should_stop()

    def _save_at(self, step: int) -> None:
        known = hooks.known_checkpoints()
        _script.is_saving = True
        try:
            self._save(step)
        except BaseException as error:
            hooks.checkpoint_failed(f"{type(error).__name__}: {error}")
            raise
        finally:
            _script.is_saving = False
        is_first = _agreement is None or _agreement.rank == 0
        if is_first and hooks.known_checkpoints() == known:
            hooks.checkpoint_saved(step)

    def end(self) -> None:
        """End the epoch."""
        if _agreement is not None:
            _agreement.leave()


hooks.on_checkpoint = _on_checkpoint
hooks.state_of_script = _ScriptLoop
