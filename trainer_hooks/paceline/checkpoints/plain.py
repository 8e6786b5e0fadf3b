"""Values of common types that torch does not load safely, as tuples of plain ones.

A state may contain arrays and numbers of numpy, a deque of losses or a start time. Torch loads only
plain types without running the code that a file names. So each of these values is stored as
`(name of its kind, plain values ...)`, and built again by the function of that name.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

_PREFIX = "paceline.value."
# Those kinds of numpy whose arrays torch reads in place: bool, integers, floats, complex numbers.
_TENSOR_KINDS = "biufc"
_FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    each.__name__: each for each in (int, float, complex, bool, str, bytes, list, tuple, dict, set)
} | {None: None}
_TO_PLAIN: dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    deque: ("deque", lambda v: (list(v), v.maxlen)),
    frozenset: ("frozenset", lambda v: (list(v),)),
    range: ("range", lambda v: (v.start, v.stop, v.step)),
    datetime: ("datetime", lambda v: (v.isoformat(),)),
    date: ("date", lambda v: (v.isoformat(),)),
    timedelta: ("timedelta", lambda v: (v.days, v.seconds, v.microseconds)),
    type(Path()): ("path", lambda v: (str(v),)),
    type(PurePath()): ("pure_path", lambda v: (str(v),)),
}


def as_plain(value: Any) -> Any:
    """Return a value as plain types; the value itself if it is of no such kind.

    The items of a deque, frozenset or defaultdict are as they were. A defaultdict whose factory has
    no name here becomes a dict.
    """
    if (known := _TO_PLAIN.get(type(value))) is not None:
        kind, to_plain = known
        return (_PREFIX + kind, *to_plain(value))
    if type(value) is defaultdict:
        factory = value.default_factory
        name = getattr(factory, "__name__", None)
        is_known = _FACTORIES.get(name) is factory
        return (_PREFIX + "defaultdict", name, dict(value)) if is_known else dict(value)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return value
    is_array = type(value) is numpy.ndarray  # a memmap, for one, is a file of the script's own
    if not is_array and not isinstance(value, numpy.generic):
        return value
    if value.dtype.hasobject or value.dtype.names:
        return value
    shape = value.shape if is_array else None
    return (_PREFIX + "numpy", value.dtype.str, shape, value.tobytes())


def array_as_plain(tensor: object) -> tuple[Any, ...]:
    """Return an array as plain types; `from_plain` is given the tensor that it is stored as."""
    return (_PREFIX + "array", tensor)


def from_plain(stored: tuple[Any, ...]) -> Any:
    """Return the value of a tuple of `as_plain`; another tuple as it is."""
    if not stored or not isinstance(stored[0], str) or not stored[0].startswith(_PREFIX):
        return stored
    build = _BUILD.get(stored[0].removeprefix(_PREFIX))
    return stored if build is None else build(*stored[1:])


def as_tensor(value: Any) -> Tensor | None:
    """Return an array of numpy as a tensor, which shares its memory if torch can; None: neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return None
    if value.dtype.kind not in _TENSOR_KINDS or not value.dtype.isnative:
        return None
    if not value.flags.behaved or any(stride < 0 for stride in value.strides):
        value = value.copy()
    try:
        return torch.from_numpy(value)
    except TypeError:  # a type that torch lacks, such as longdouble
        return None


def _numpy(dtype: str, shape: tuple[int, ...] | None, content: bytes) -> Any:
    array = import_module("numpy").frombuffer(content, dtype)
    return array[0] if shape is None else array.reshape(shape).copy()


def _array(tensor: Tensor) -> Any:
    return tensor.cpu().numpy()


def _defaultdict(factory: str | None, table: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(_FACTORIES[factory], table)


_BUILD: dict[str, Callable[..., Any]] = {
    "deque": deque,
    "frozenset": frozenset,
    "range": range,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": timedelta,
    "path": Path,
    "pure_path": PurePath,
    "defaultdict": _defaultdict,
    "numpy": _numpy,
    "array": _array,
}
