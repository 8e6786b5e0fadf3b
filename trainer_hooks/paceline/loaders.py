"""The result of `paceline.steps`: the loader, with iterations that the step counter sees.

Frameworks build loaders again from one that they are given: Lightning to add a sampler, Accelerate
to split batches. They do so only for an instance of torch's `DataLoader`, from its attributes and
its class. For a `DataLoader` the result is therefore an instance of a subclass of its own class,
with the same attributes, also those that are set later. Anything else is wrapped in a proxy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from paceline.loop import Loop, Resumable, iterate

Batch = TypeVar("Batch")
Loader = TypeVar("Loader", bound=Iterable[Any])
FindLoop = Callable[[], Loop | None]


class Start:
    """The number of the first step, taken once: the next epoch continues the count."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def take(self) -> int | None:
        """Return the number at the first call, then None."""
        step, self.step = self.step, None
        return step


def count_steps(
    loader: Loader, find_loop: FindLoop, start: int | None, state: Resumable | None
) -> Loader:
    """Return an iterable like the loader whose iterations are recorded.

    `find_loop` is called at iteration: a loader may be created before `init`. With a state the
    iterations are those of the loader itself, whose position may be part of it.
    """
    data = sys.modules.get("torch.utils.data")
    if state is None and data is not None and isinstance(loader, data.DataLoader):
        with suppress(TypeError):  # its class does not allow this subclass
            counted = _counted_loader(type(loader), vars(loader), find_loop, Start(start))
            return cast(Loader, counted)
    return cast(Loader, Steps(loader, find_loop, start, state))


def _counted_loader(
    base: type[Any], attributes: dict[str, Any], find_loop: FindLoop, start: Start
) -> Any:
    """Return an instance of a subclass of `base` whose iterations are recorded.

    It shares the attributes of the loader, among them its persistent workers. The subclass takes
    the arguments of `base`, so that a framework can create another one.
    """

    def iterate(self: Any) -> Iterator[Any]:
        loop = find_loop()
        batches: Iterable[Any] = _Once(lambda: base.__iter__(self))
        return iter(batches) if loop is None else loop.run(batches, start.take())

    def reduce(self: Any, _: object) -> tuple[Any, ...]:
        return _counted_loader, (base, dict(vars(self)), find_loop, start)

    members = {"__iter__": iterate, "__reduce_ex__": reduce, "__doc__": base.__doc__}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    counted: Any = object.__new__(type(base.__name__, (base,), members))
    object.__setattr__(counted, "__dict__", attributes)
    return counted


class _Once:
    """An iterable from a function that returns an iterator."""

    def __init__(self, iterate: Callable[[], Iterator[Any]]) -> None:
        self._iterate = iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()


class Steps(Generic[Batch]):
    """An iterable over a loader that also has the loader's attributes and length."""

    def __init__(
        self,
        loader: Iterable[Batch],
        find_loop: FindLoop,
        start: int | None,
        state: Resumable | None = None,
    ) -> None:
        vars(self).update(_loader=loader, _find_loop=find_loop, _start=Start(start), _state=state)

    def __iter__(self) -> Iterator[Batch]:
        loop = self._find_loop()
        if loop is None:
            return iter(self._loader) if self._state is None else iterate(self._loader, self._state)
        batches: Iterator[Batch] = loop.run(self._loader, self._start.take(), self._state)
        return batches

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"{type(self._loader).__name__} has no len()")
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader, such as `sampler` or `batch_size`."""
        if name == "_loader" or name.startswith("__"):  # copy and pickle: no `__init__` yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader."""
        setattr(self._loader, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the loader."""
        delattr(self._loader, name)
