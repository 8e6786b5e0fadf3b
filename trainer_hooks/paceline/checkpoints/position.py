"""The position in the data: how many batches of which epoch were taken, and how to return to it.

The number of parameters that train at this position is noted, too.

A loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`, returns
there by itself. With any other, the epoch is started again with the random states that it started
with, and the batches that were taken are skipped. Then the random states of the checkpoint are set.

A checkpoint that was made between two epochs has the state of the loaders after the first of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, GeneratorType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from paceline.checkpoints.random_states import RandomStates


class DataPosition:
    """Epochs begun and batches taken by this rank."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []  # those that a loop may only have inside another iterable
        self.stateful: list[Any] = []  # torchdata's, which save their own position
        self.optimizers: list[Optimizer] = []
        self.epoch = -1  # number of the one in progress
        self.batches = 0  # taken in this epoch
        self.is_over = False  # this epoch, and its loop was left
        self.is_last = True  # no epoch follows that `Checkpoints.epochs` counts
        # Whether a function called `sys.exit`, as a handler of a signal does. None: nothing did.
        self.is_left_by_exit: bool | None = None
        self.batches_per_step = 1  # in the newest step: more if it accumulates gradients
        self._in_step = 0
        self._in_steps = 0  # batches of this epoch that belong to completed steps
        self._began_with: dict[str, Any] = {}  # random states at the begin of the epoch
        self._loader: ref[Any] | None = None  # the one of the loop
        self._first: list[Tensor] | None = None  # states of its generators as the script made them
        self._ended_with: list[dict[str, Any]] = []  # to return to before the next epoch begins

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {
            "epoch": self.epoch,
            "batches": self._in_steps,
            "is_over": self.is_over,
            "batches_per_step": self.batches_per_step,
            "began_with": self._began_with,
            "first": self._first,
            "ended_with": self._ends() if self.is_over else [],
            "trained": self.trained(),
            "random": RandomStates().state_dict(),
        }

    def trained(self) -> int:
        """Return how many parameters of the optimizers are not frozen."""
        return sum(
            parameter.requires_grad
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def exits(self, caller: FrameType) -> None:
        """Note that the script calls `sys.exit`. Outside of any function it ends the script."""
        self.is_left_by_exit = caller.f_code.co_name != "<module>"

    def left(self) -> None:
        """Note whether an interruption has closed the loop, as a handler of a signal raises it.

        These are `SystemExit`, `KeyboardInterrupt` and asyncio's `CancelledError`. Nothing that is
        watched is called, so that only the exception shows it, which is one of the newest objects.
        """
        if self.is_left_by_exit is not None:
            return
        kinds = {type(each) for young in (0, 1) for each in gc.get_objects(generation=young)}
        if any(
            issubclass(kind, BaseException) and not issubclass(kind, Exception | GeneratorExit)
            for kind in kinds
        ):
            self.is_left_by_exit = True

    def took(self, skipped: int = 0) -> None:
        """Count a batch that was taken, and those that were left out before it."""
        self.is_left_by_exit = None
        self.batches += 1 + skipped
        self._in_step += 1

    def accumulates(self) -> bool:
        """Return whether the step in progress has several batches, as far as is known."""
        return max(self._in_step, self.batches_per_step) > 1

    def step_ended(self) -> None:
        """Note the batches of the step that has ended."""
        self.batches_per_step, self._in_step = max(1, self._in_step), 0
        self._in_steps = self.batches

    def _ends(self) -> list[dict[str, Any]]:
        """Return the states of the generators of the loop's loader, and of those that are named.

        With each of them, whether it has an iterator.
        """
        return [
            {
                "generators": [each.get_state() for each in _generators(loader)],
                "has_iterator": _has_iterator(loader),
                "iteration": _iteration(loader),
            }
            for loader in (self._known(), *self.loaders, *self.stateful)
        ]

    def _known(self) -> Any:
        return None if self._loader is None else self._loader()

    def end_again(self, saved: dict[str, Any]) -> None:
        """Return to a position between two epochs; the rest of the state is loaded.

        The loader of the loop may not be known yet.
        """
        first = saved.get("first") or []
        is_seeded = saved["epoch"] > 0 and all(
            map(torch.equal, saved["began_with"]["generators"], first)
        )
        self._first = None if is_seeded else first
        self._ended_with = saved.get("ended_with") or []  # a release before had none
        for loader in self.stateful:
            loader.state_dict()  # makes the iterator of the last epoch, which draws numbers
        for loader, end in zip(
            (self._known(), *self.loaders, *self.stateful), self._ended_with, strict=False
        ):
            _set(_generators(loader), end["generators"])
            _set_iteration(loader, end.get("iteration"))

    def _continue(self, loader: Any) -> None:
        """Bring a loader to the state that it had after the last epoch, if it is not yet."""
        ends, self._ended_with = self._ended_with, []
        if not ends:
            return
        is_named = any(loader is each for each in (*self.loaders, *self.stateful))
        is_unknown = self._loader is None and not is_named
        generators = _generators(loader)
        if is_unknown and _are(generators, self._first):  # the script has not seeded them again
            _set(generators, ends[0]["generators"])
            if not _iteration(loader):  # nor called `set_epoch`
                _set_iteration(loader, ends[0].get("iteration"))
        is_same = is_unknown or is_named or loader is self._known()
        for each, end in zip((loader if is_same else None, *self.loaders), ends, strict=False):
            is_stateful = any(each is other for other in self.stateful)
            if (
                end["has_iterator"]
                and each is not None
                and not (is_stateful or _has_iterator(each))
            ):
                with _unchanged(generators):
                    _begin_first(each)

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin the next epoch."""
        self._continue(loader)
        self.watch(loader)
        if self._first is None:
            self._first = [each.get_state() for each in _generators(loader)]
        self.epoch += 1
        self.batches = self._in_steps = 0
        self.is_over = False
        self._began_with = {
            "random": RandomStates().state_dict(),
            "generators": [each.get_state() for each in _generators(loader, *self.loaders)],
            "length": batches_of(loader),
            "has_iterator": [_has_iterator(each) for each in (loader, *self.loaders)],
            "iterations": [_iteration(each) for each in (loader, *self.loaders)],
        }
        return iter(loader)

    def watch(self, loader: Iterable[Any]) -> None:
        """Note the loader of the loop."""
        self._loader = ref(loader) if isinstance(loader, DataLoader) else None

    def resume(
        self,
        loader: Iterable[Any],
        saved: dict[str, Any],
        *,
        has_state: bool,
        batches: int,
        is_same_rank: bool,
    ) -> Iterator[Any]:
        """Return to a saved position; the rest of the state is loaded.

        Args:
            loader: as in the saved run.
            saved: the position.
            has_state: the loader has loaded its own state.
            batches: number to skip if it has not.
            is_same_rank: `saved` is of this rank, with the same number of ranks.
        """
        self.epoch, self.batches = saved["epoch"], batches
        self._in_steps = batches
        self.batches_per_step = saved.get("batches_per_step", 1)  # a release before had none
        self._began_with = saved["began_with"]
        self._first = saved.get("first")
        self.watch(loader)
        had = self._began_with.get("has_iterator", False)
        had = had if isinstance(had, list) else [had]  # a release before had that of `loader` only
        for each, had_iterator in zip((loader, *self.loaders), had, strict=False):
            is_counted = each is not loader or not has_state
            if had_iterator and is_counted and not _has_iterator(each):
                _begin_first(each)
        if is_same_rank:
            RandomStates().load_state_dict(self._began_with["random"])
        # a release before had none
        counted = self._began_with.get("iterations", ())
        for each, iteration in zip((loader, *self.loaders), counted, strict=False):
            _set_iteration(each, iteration)
        if is_same_rank and not has_state:
            _set(_generators(loader, *self.loaders), self._began_with["generators"])
        iterator = iter(loader)
        if not has_state:
            for _ in range(batches):
                if next(iterator, self) is self:
                    break
        if is_same_rank:
            RandomStates().load_state_dict(saved["random"])
        return iterator


def has_begun(iterable: object) -> bool:
    """Return whether an iterator such as `enumerate(loader)` reads ahead from a loader already."""
    held: Iterable[object] = ()
    if isinstance(iterable, GeneratorType):
        frame = iterable.gi_frame
        held = () if frame is None else (frame.f_locals.get(".0"),)  # a generator expression
    elif isinstance(iterable, enumerate | filter | map | zip):
        held = iterable.__reduce__()[1]
    is_iterator = isinstance(iterable, _BaseDataLoaderIter)
    reads_ahead = is_iterator and not isinstance(iterable, _SingleProcessDataLoaderIter)
    return reads_ahead or any(map(has_begun, held))


def batches_of(loader: object) -> int | None:
    """Return the number of batches of an epoch of a DataLoader; None: unknown."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    try:
        return len(sampler)
    except Exception:  # an iterable data set has none, and a sampler of the script may fail
        return None


def _has_iterator(loader: Any) -> bool:
    """Return whether a DataLoader with `persistent_workers` has started them.

    The first iteration draws a seed for them, before that of the epoch's order. A stateful one of
    Accelerate draws its seed when it is created instead.
    """
    is_created = getattr(loader, "_initial_iter_for_state_dict", False)
    return getattr(loader, "_iterator", None) is not None and not is_created


def _begin_first(loader: Any) -> None:
    """Draw what the first iteration of a DataLoader draws; Accelerate's is a generator."""
    iter(getattr(loader, "base_dataloader", loader))


def _generators(*loaders: Any) -> list[torch.Generator]:
    """Return the generators that loaders draw from, besides torch's default one."""
    owners, inner = list(loaders), list(loaders)
    # A batch sampler has a sampler; Accelerate's `BatchSamplerShard` has such a batch sampler.
    names = ("sampler", "batch_sampler")
    for _ in range(3):
        inner = [getattr(each, name, None) for each in inner for name in names]
        owners += inner
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [each for each in found if isinstance(each, torch.Generator)]
    return list({id(each): each for each in generators}.values())


def _iteration(loader: Any) -> int | None:
    """Return the epochs that Accelerate's loader counts; the order of the data may follow them."""
    value = getattr(loader, "iteration", None) if isinstance(loader, DataLoader) else None
    return value if isinstance(value, int) else None


def _set_iteration(loader: Any, value: int | None) -> None:
    if value is not None and _iteration(loader) not in (None, value):
        loader.iteration = value


def _set(generators: Iterable[torch.Generator], states: Iterable[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


def _are(generators: Sequence[torch.Generator], states: Sequence[Tensor] | None) -> bool:
    """Return whether generators have these states."""
    return len(generators) == len(states or ()) and all(
        torch.equal(generator.get_state(), state)
        for generator, state in zip(generators, states or (), strict=True)
    )


@contextmanager
def _unchanged(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the random states afterwards."""
    states, own = RandomStates().state_dict(), [each.get_state() for each in generators]
    yield
    RandomStates().load_state_dict(states)
    _set(generators, own)
