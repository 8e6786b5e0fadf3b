"""Values of common types that torch does not load safely, as tuples of plain ones.

A state may contain arrays and numbers of numpy, a deque of losses or a start time. Torch loads only
plain types without running the code that a file names. So each of these values is stored as
`(name of its type, plain values ...)`, and built again from a table of types.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PREFIX = "paceline.value."
# Those kinds of numpy whose arrays torch reads in place: bool, integers, floats, complex numbers.
_TENSOR_KINDS = "biufc"


class _Kind(NamedTuple):
    type: type
    to_plain: Callable[[Any], tuple[Any, ...]]
    build: Callable[..., Any]


_KINDS = {
    "deque": _Kind(deque, lambda v: (list(v), v.maxlen), deque),
    "frozenset": _Kind(frozenset, lambda v: (list(v),), frozenset),
    "range": _Kind(range, lambda v: (v.start, v.stop, v.step), range),
    "datetime": _Kind(datetime, lambda v: (v.isoformat(),), datetime.fromisoformat),
    "date": _Kind(date, lambda v: (v.isoformat(),), date.fromisoformat),
    "timedelta": _Kind(timedelta, lambda v: (v.days, v.seconds, v.microseconds), timedelta),
    "path": _Kind(type(Path()), lambda v: (str(v),), Path),
    "pure_path": _Kind(type(PurePath()), lambda v: (str(v),), PurePath),
}
_NAMES = {kind.type: name for name, kind in _KINDS.items()}


def as_plain(value: Any) -> Any:
    """Return a value as plain types; the value itself if its type is not in the table.

    The items of a deque or frozenset are as they were.
    """
    if (name := _NAMES.get(type(value))) is not None:
        return (_PREFIX + name, *_KINDS[name].to_plain(value))
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


def from_plain(stored: tuple[Any, ...]) -> Any:
    """Return the value of a tuple of `as_plain`; another tuple as it is."""
    if not stored or not isinstance(stored[0], str) or not stored[0].startswith(_PREFIX):
        return stored
    name, *values = stored
    if name == _PREFIX + "numpy":
        numpy = import_module("numpy")
        dtype, shape, content = values
        array = numpy.frombuffer(content, dtype)
        return array[0] if shape is None else array.reshape(shape).copy()
    kind = _KINDS.get(name.removeprefix(_PREFIX))
    return stored if kind is None else kind.build(*values)


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
