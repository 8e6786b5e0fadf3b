"""The checkpoints that a script saves by itself, with `torch.save` and its kin.

A script saves much else: metrics, samples, the weights for an evaluation. A save counts as a
checkpoint if it contains the state of an optimizer or, in a process that has never saved one, all
parameters that train. This reads the structure and the shapes, which are on the host; no tensor is
touched. If in doubt a save does not count: a repair that waits for a checkpoint then asks a person.

A save that raises an error is a failed checkpoint. A complete one that it has overwritten is
withdrawn. One that the script has renamed since, because it saves under another name first, is
found by its inode before the next save, also if its directory was renamed.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from paceline.loop import Loop
from paceline.recorder import Recorder

MOST_OBJECTS = 1 << 16  # that are searched in one save
LONGEST_PATH = 300
MOST_FILES = 1024  # number of files that are compared in one checkpoint
MOST_COMPLETE = 8  # number of checkpoints that are compared
FULL_BYTES = 1 << 20  # a file system with less free space is full
MOST_PATHS = 4  # that are described, if the name of each checkpoint is another


class Save(NamedTuple):
    """One call of a function that saves."""

    contents: Any
    path: Any  # or a file with a name
    takes_stateful: bool = False  # as torch.distributed.checkpoint does


Files = tuple[tuple[str, int, int], ...]  # name, bytes and time of the last change
NO_SPACE = "No space left on device"
_INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class _Complete(NamedTuple):
    step: int
    files: Files


class _Entry(NamedTuple):
    """A file or a directory, as it was."""

    path: str
    device: int
    inode: int
    size: int

    @classmethod
    def at(cls, path: str) -> _Entry | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return cls(path, status.st_dev, status.st_ino, status.st_size)

    def is_at(self, path: str) -> bool:
        """Return whether it has this path now, and did not become smaller."""
        now = _Entry.at(path)
        if now is None or (now.device, now.inode) != (self.device, self.inode):
            return False
        return now.size >= self.size

    def find(self) -> str | None:
        """Return its path of now, if it has one in the same directory."""
        if self.is_at(self.path):
            return self.path
        try:
            with os.scandir(os.path.dirname(self.path)) as entries:
                names = [e.path for e in islice(entries, MOST_FILES) if e.inode() == self.inode]
        except OSError:
            return None
        return next(filter(self.is_at, names), None)


class _Written(NamedTuple):
    """The newest checkpoint, a file or a directory, and the directory that it is in."""

    entry: _Entry
    directory: _Entry

    @classmethod
    def at(cls, path: str) -> _Written | None:
        entry, directory = _Entry.at(path), _Entry.at(os.path.dirname(path))
        return None if entry is None or directory is None else cls(entry, directory)

    def find(self) -> str | None:
        """Return its path of now."""
        found = self.entry.find()
        if found is None and (directory := self.directory.find()) is not None:
            path = os.path.join(directory, os.path.basename(self.entry.path))
            found = path if self.entry.is_at(path) else None
        return found


class Saves:
    """Reports the checkpoints of one session. The thread that trains calls its public methods."""

    def __init__(self, recorder: Recorder, loop: Loop, describe: Callable[[str], None]) -> None:
        """`describe` publishes where the checkpoints are."""
        self._recorder = recorder
        self._loop = loop
        self._describe = describe
        self._paths: list[str] = []  # that were described
        self._latest = ""
        self._contain_optimizers = False
        self._pending: Any = None  # future of the newest asynchronous save
        self._complete: dict[str, _Complete] = {}  # by path
        self._newest: _Written | None = None
        self._renames = False  # the script: a name counts once the checkpoint has kept it
        self.count = 0  # checkpoints that were reported or recognized, complete or not
        self.are_reported = False  # the script or its framework reports its checkpoints itself

    def overwritten(self, save: Save) -> str | None:
        """Return the path of the complete checkpoint that a save is about to overwrite, if any."""
        self._follow_rename()
        path = _path(save.path)
        return path if path is not None and self._is_intact(path) else None

    def saved(
        self, save: Save, overwritten: str | None, optimizers: Iterable[Any], result: Any
    ) -> None:
        """Report a save that has returned, if it is of a checkpoint.

        Args:
            save: the call.
            overwritten: what `overwritten` returned before the call.
            optimizers: all optimizers of this process that are known.
            result: what the call returned; of an asynchronous one, the future of its completion.
        """
        future = getattr(result, "upload_completion", result)
        is_pending = hasattr(future, "add_done_callback")
        if is_pending:
            self._pending = future
        step = self._loop.completed_steps()
        if self.are_reported or not step or not self._is_checkpoint(save, optimizers):
            return
        self.count += 1
        if not self._renames:
            self.describe(save.path)
        path = _path(save.path)
        if is_pending:
            future.add_done_callback(partial(self._completed, step, path, overwritten))
        else:
            self._succeeded(step, path)

    def failed(
        self, save: Save, overwritten: str | None, optimizers: Iterable[Any], error: BaseException
    ) -> None:
        """Report a save that has raised an error, if it was of a checkpoint.

        Args:
            save: the call.
            overwritten: what `overwritten` returned before the call.
            optimizers: all optimizers of this process that are known.
            error: what it raised.
        """
        if self.are_reported or not self._loop.completed_steps():
            return
        if isinstance(error, _INTERRUPTS) or not self._is_checkpoint(save, optimizers):
            return
        self._failed(_path(save.path), overwritten, error)

    def forget_pending(self) -> None:
        """Have `wait` consider only the saves from now on."""
        self._pending = None

    def wait(self) -> bool:
        """Wait for the newest asynchronous save. Return False if it failed."""
        future, self._pending = self._pending, None
        try:
            return future is None or future.exception() is None
        except CancelledError:
            return False

    def _completed(self, step: int, path: str | None, overwritten: str | None, future: Any) -> None:
        """An asynchronous save has ended, in any thread."""
        try:
            error = future.exception()
            if error is None:
                self._succeeded(step, path)
            else:
                self._failed(path, overwritten, error)
        except (Exception, CancelledError):
            self._recorder.failures += 1

    def _succeeded(self, step: int, path: str | None) -> None:
        self._recorder.checkpoint_saved(step)
        if path is not None:
            self._complete.pop(path, None)
            self._complete[path] = _Complete(step, _files(path))
            if len(self._complete) > MOST_COMPLETE:
                del self._complete[next(iter(self._complete))]
            self._newest = _Written.at(path)

    def _follow_rename(self) -> None:
        """Publish the newest checkpoint under the name that the script has given it since."""
        newest = self._newest
        if newest is None:
            return
        path, before = newest.find(), newest.entry.path
        if path is not None and (path != before or self._renames):
            self._renames = True
            self.describe(path)
        if path != before:
            self._newest = None
            known = self._complete.pop(before, None)
            if path is not None and known is not None:
                self._complete[path] = known

    def _failed(self, path: str | None, overwritten: str | None, error: BaseException) -> None:
        self._recorder.checkpoint_failed(_reason(error, path))
        if overwritten is None or self._is_intact(overwritten):
            return
        self._complete.pop(overwritten, None)
        complete = list(self._complete.items())  # an asynchronous save may add one
        left = [known.step for place, known in complete if self._is_intact(place)]
        self._recorder.checkpoint_saved(max(left, default=0))

    def _is_intact(self, path: str) -> bool:
        """Return whether the files at this path are those of a complete checkpoint."""
        known = self._complete.get(path)
        return known is not None and known.files == _files(path)

    def _is_checkpoint(self, save: Save, optimizers: Iterable[Any]) -> bool:
        shapes, has_optimizer = _contents(save)
        if has_optimizer:
            self._contain_optimizers = True
            return True
        if self._contain_optimizers:
            return False  # the weights alone; the script resumes from the complete ones
        trained = Counter(
            tuple(parameter.shape)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
        return bool(trained) and trained <= shapes

    def describe(self, path: Any) -> None:
        """Publish where a checkpoint is: a path, or a file with a name."""
        place = _path(path)
        if place is None:
            return
        shown = _pattern(place, parts=1)
        if shown != self._latest and _pattern(shown, parts=2) == _pattern(self._latest, parts=2):
            shown = _pattern(shown, parts=2)  # the folders have numbers
        self._latest = shown
        is_new = shown not in self._paths and len(self._paths) < MOST_PATHS
        if is_new and len(shown) <= LONGEST_PATH:
            self._paths.append(shown)
            self._describe(shown)


def completed_steps(optimizers: Iterable[Any]) -> int:
    """Return how many steps the optimizers have made, as Adam and its kin count them; 0 if unknown.

    A checkpoint restores this count, also where a framework or script has none of its own.
    """
    counts = [0]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            count = state.get("step") if isinstance(state, dict) else None
            if count is not None and not getattr(count, "is_cuda", False):
                counts.append(int(count))
            break
    return max(counts)


def _path(path: Any) -> str | None:
    """Return the absolute path of a path, or of a file with a name."""
    if not isinstance(path, str | os.PathLike):
        path = getattr(path, "name", None)
    if not isinstance(path, str | os.PathLike):
        return None
    return os.path.abspath(os.fsdecode(path))


def _files(path: str) -> Files:
    """Return the name, size and time of the last change of each file at a path."""
    try:
        if not os.path.isdir(path):
            status = os.stat(path)
            return (("", status.st_size, status.st_mtime_ns),)
        with os.scandir(path) as entries:
            found = [(each.name, each.stat()) for each in islice(entries, MOST_FILES)]
    except OSError:
        return ()
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in found))


def _reason(error: BaseException, path: str | None) -> str:
    """Return why a save failed, in one line.

    torch.distributed.checkpoint lists the tracebacks of all ranks. The zip file of `torch.save`
    reports a write that failed as an unexpected position.
    """
    lines = [line for line in map(str.strip, str(error).splitlines()) if line]
    has_traceback = any(line.startswith("Traceback") for line in lines)
    text = lines[-1] if has_traceback else f"{type(error).__name__}: {' '.join(lines[:1])}"
    is_write = has_traceback or isinstance(error, OSError | RuntimeError)
    return with_cause(text, path) if is_write and path is not None else text


def with_cause(text: str, path: str) -> str:
    """Return why a write to a path failed; first that there is no space left, if so."""
    is_cause = NO_SPACE not in text and _is_full(path)
    return f"{NO_SPACE}: {text}" if is_cause else text


def _is_full(path: str) -> bool:
    """Return whether the file system of a path has no space left, or no inodes."""
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    status = os.statvfs(path)
    has_inodes = status.f_favail > 0 or not status.f_files
    return status.f_bavail * status.f_frsize < FULL_BYTES or not has_inodes


def _pattern(path: str, *, parts: int) -> str:
    """Return the path with * for the numbers in its last parts: `/ckpt/step-*.pt`."""
    components = path.split(os.sep)
    starred = [re.sub(r"\d+", "*", component) for component in components[-parts:]]
    return os.sep.join([*components[:-parts], *starred])


def _contents(save: Save) -> tuple[Counter[tuple[int, ...]], bool]:
    """Return the shapes of the saved tensors, and whether there is the state of an optimizer."""
    torch: Any = sys.modules["torch"]
    shapes: Counter[tuple[int, ...]] = Counter()
    waiting, left = [save.contents], MOST_OBJECTS
    while waiting and left > 0:
        left -= 1
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            shapes[tuple(each.shape)] += 1
        elif isinstance(each, torch.nn.Module):
            shapes.update(tuple(parameter.shape) for parameter in each.parameters())
        elif isinstance(each, torch.optim.Optimizer) or _is_optimizer_state(each):
            return shapes, True
        elif isinstance(each, dict):
            waiting += islice(dict.values(each), left)
        elif isinstance(each, list | tuple):
            waiting += islice(each, left)
        elif save.takes_stateful and hasattr(each, "state_dict"):
            return shapes, True  # an object of the script with all that it resumes from
    return shapes, False


def _is_optimizer_state(each: Any) -> bool:
    groups = each.get("param_groups") if isinstance(each, dict) and "state" in each else None
    return isinstance(groups, list) and len(groups) > 0
