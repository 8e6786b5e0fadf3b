"""The states of the random generators of a process."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch


class RandomStates:
    """The generators of Python, numpy (if loaded), torch and the current device."""

    def state_dict(self) -> dict[str, Any]:
        """Return their states. Their many numbers are bytes, which take less time to serialize."""
        version, numbers, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": (version, struct.pack(f"<{len(numbers)}I", *numbers), gauss),
            "torch": torch.get_rng_state(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            state["numpy"] = (str(name), keys.astype("<u4").tobytes(), *map(_plain, rest))
        if (device := _device()) is not None:
            state["device"] = device.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them."""
        version, numbers, gauss = state["python"]
        random.setstate((version, _numbers(numbers), gauss))
        torch.set_rng_state(state["torch"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            name, keys, *rest = state["numpy"]
            numpy.random.set_state((name, numpy.array(_numbers(keys), dtype=numpy.uint32), *rest))
        device = _device()
        if device is not None and "device" in state:
            device.set_rng_state(state["device"])


class OwnGenerator:
    """A generator that the script made: a `random.Random`, numpy's `Generator` or `RandomState`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    @staticmethod
    def fits(value: object) -> bool:
        """Return whether an object is such a generator."""
        numpy = sys.modules.get("numpy")
        is_numpy = numpy is not None and isinstance(
            value, numpy.random.Generator | numpy.random.RandomState
        )
        is_python = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
        return is_numpy or is_python

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        if isinstance(self._generator, random.Random):
            return {"state": self._generator.getstate()}
        if hasattr(self._generator, "get_state"):  # a RandomState of numpy
            return {"state": _without_arrays(self._generator.get_state(legacy=False))}
        return {"state": _without_arrays(self._generator.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set it."""
        if isinstance(self._generator, random.Random):
            self._generator.setstate(state["state"])
        elif hasattr(self._generator, "set_state"):
            self._generator.set_state(state["state"])
        else:
            self._generator.bit_generator.state = state["state"]


def _numbers(stored: bytes | Sequence[int]) -> tuple[int, ...]:
    """Return stored numbers; checkpoints of earlier releases have them one by one."""
    if isinstance(stored, bytes):
        return struct.unpack(f"<{len(stored) // 4}I", stored)
    return tuple(stored)


def _without_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a bit generator with lists in place of its arrays."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            plain[name] = _without_arrays(value)
        else:
            plain[name] = value.tolist() if hasattr(value, "tolist") else value
    return plain


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else int(value)


def _device() -> Any | None:
    """Return the module of the accelerator if this process uses it."""
    cuda: Any = torch.cuda
    return cuda if cuda.is_available() and cuda.is_initialized() else None
