"""Recognition of updates that no optimizer of torch makes, from the parameters and their gradients.

Between two backward passes of one step nothing changes: gradients accumulate. Between two steps the
parameters change, and the gradients are set to zero or removed. A few parameters are compared, once
after each backward pass and once or twice before the next one. No device is accessed: torch counts
changes in place of each tensor, and values are read only in host memory.

Samples are weak references: a training that replaces its parameters is seen to do so.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from ctypes import string_at
from typing import Any

SAMPLES = 4  # parameters, evenly spread over the model
COMPARED_BYTES = 64  # first bytes of a parameter or gradient
MOST_NODES = 20_000  # visited nodes of a graph, in search of parameters
MOST_CHOICES = 3  # attempts that find no parameters


class UpdateProbe:
    """Samples of the parameters that are trained.

    The thread that trains calls all methods.

    Args:
        torch: the module.
        optimized: returns the parameters of the optimizers of torch; none: there is no such one.
    """

    def __init__(self, torch: Any, optimized: Callable[[], Iterable[Any]]) -> None:
        self._torch = torch
        self._optimized = optimized
        self._samples: list[_Sample] = []
        self._choices = 0  # attempts since `forget`
        self.sees_gradients = True  # no optimizer of torch may set gradients to zero before a step

    @property
    def is_usable(self) -> bool:
        """Whether an update would be seen."""
        return any(sample.is_visible for sample in self._samples)

    def choose(self, outputs: Any, inputs: Iterable[Any] = ()) -> None:
        """Choose the samples, unless there are any, when a backward pass begins.

        Args:
            outputs: the tensors that it starts from.
            inputs: the tensors whose gradients it returns, if it accumulates none.
        """
        if self._samples or self._choices == MOST_CHOICES:
            return
        self._choices += 1
        found = [each for each in self._optimized() if each.requires_grad]
        self.sees_gradients = not found
        if not found:
            found = [each for each in inputs if getattr(each, "is_leaf", False)]
        if not found:
            found = list(self._leaves(outputs))
        kind = self._torch.nn.Parameter
        found = [each for each in found if isinstance(each, kind)] or found
        last = len(found) - 1
        places = {round(last * n / (SAMPLES - 1)) for n in range(SAMPLES)} if found else set()
        self._samples = [_Sample(self._torch, found[place]) for place in sorted(places)]

    def record(self) -> None:
        """Remember the samples: a backward pass has ended."""
        self._samples = [sample for sample in self._samples if sample.record()]

    def forget(self) -> None:
        """Choose others at the next backward pass."""
        self._samples, self._choices = [], 0

    def has_update(self) -> bool:
        """Return whether there was an update since the last backward pass."""
        for sample in self._samples:
            parameter = sample.parameter()
            if parameter is None:
                self.forget()
                return True
            if sample.is_updated(parameter, with_gradient=self.sees_gradients):
                return True
        return False

    def _leaves(self, outputs: Any) -> Iterator[Any]:
        """Yield the leaves of the graph, those that are near to the outputs first."""
        tensors = outputs if isinstance(outputs, list | tuple) else [outputs]
        nodes = deque(node for each in tensors if (node := getattr(each, "grad_fn", None)))
        seen = set(nodes)
        for _ in range(MOST_NODES):
            if not nodes:
                return
            node = nodes.popleft()
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)


class _Sample:
    """A parameter, and what it was after the last backward pass."""

    def __init__(self, torch: Any, parameter: Any) -> None:
        self.parameter = weakref.ref(parameter)
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._strided = torch.strided
        self._state = self._read(parameter)
        self._gradient = self._read(parameter.grad)

    @property
    def is_visible(self) -> bool:
        """Whether any usual way to update it is seen."""
        return self._gradient is not None or bool(self._state and self._state[2])

    def record(self) -> bool:
        """Remember its state. Return False if it is no parameter that lasts."""
        parameter = self.parameter()
        if parameter is None:
            return True  # it was replaced: an update, see `has_update`
        self._state = self._read(parameter)
        self._gradient = self._read(parameter.grad)
        return self._state is not None

    def is_updated(self, parameter: Any, *, with_gradient: bool) -> bool:
        """Return whether it has changed; optionally, or its gradient was set to zero or removed."""
        state, before = self._read(parameter), self._state
        if state and before and state != before and state[0] == before[0]:
            return True
        if not with_gradient or self._gradient is None:
            return False
        return self._read(parameter.grad) != self._gradient

    def _read(self, tensor: Any) -> tuple[int, int, bytes | None] | None:
        """Return size, number of changes and first bytes; None without memory of its own.

        FSDP fills the memory of such a tensor for each pass; those of `torch.func` have none.
        """
        try:
            return None if tensor is None else self._read_memory(tensor)
        except (RuntimeError, NotImplementedError):
            return None

    def _read_memory(self, tensor: Any) -> tuple[int, int, bytes | None] | None:
        size, version = tensor.numel(), tensor._version
        if type(tensor) not in self._plain or tensor.layout is not self._strided:
            return size, version, None
        storage = tensor.untyped_storage()
        before = tensor.storage_offset() * tensor.element_size()
        length = size * tensor.element_size() if tensor.is_contiguous() else tensor.element_size()
        length = min(length, COMPARED_BYTES)
        if storage.nbytes() < before + length:
            return None
        if not length or tensor.device.type != "cpu" or tensor.is_neg() or not tensor.data_ptr():
            return size, version, None
        return size, version, string_at(tensor.data_ptr(), length)
