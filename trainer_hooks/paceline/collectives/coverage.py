"""The releases and backends of torch whose communication cannot be recorded, and why.

Where nothing is recorded, waits look like compute, and a slow rank like a healthy one. So the rank
reports the reason, in its metadata.
"""

from __future__ import annotations

import contextlib
from typing import Any

from paceline.collectives.operations import ADDED, OPERATORS, read_signature
from paceline_wire.coverage import OLDEST_TORCH, release_of

# Backends whose waits are recorded. Others may have a class of `Work` with a wait of its own.
BACKENDS = frozenset({"gloo", "nccl"})
LONGEST_REASON = 200

_NO_COMMUNICATION = frozenset({"check_for_nan"})  # operators of c10d that transfer nothing


def reason_of_release(torch_version: str) -> str | None:
    """Return why this torch is not recorded; None if it is."""
    release = release_of(torch_version)
    if release is None or release >= OLDEST_TORCH:
        return None
    return f"torch {torch_version} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"


def reason_of_operators(torch: Any) -> str | None:
    """Return which operators of this torch are not recorded; None if all are."""
    space = torch.ops.c10d
    names = torch._C._dispatch_get_all_op_names()
    present = {name.partition("::")[2].partition(".")[0] for name in names if "c10d::" in name[:6]}
    unread = []
    for name, (op, payload) in OPERATORS.items():
        if name in ADDED - present:
            continue
        try:
            arguments = getattr(space, name).default._schema.arguments
            read_signature(op, payload, [argument.name for argument in arguments])
        except (AttributeError, LookupError):
            unread.append(name)
    unread += sorted(present - OPERATORS.keys() - _NO_COMMUNICATION)
    if not unread:
        return None
    return f"torch {torch.__version__} has other operators: {', '.join(unread)}"


def reason_of_backend(process_group: Any) -> str | None:
    """Return why waits of a process group are not recorded; None if they are."""
    names = set()
    for device in getattr(process_group, "_device_types", ()):
        with contextlib.suppress(RuntimeError):  # no backend for this device
            names.add(_name(process_group._get_backend(device)))
    unknown = sorted(names - BACKENDS)
    if not unknown:
        return None
    return f"waits of the backend {' and '.join(unknown)} are unknown to Paceline"


def reason_of_error(error: Exception) -> str:
    """Return that an error has kept the recording from starting."""
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def _name(backend: Any) -> str:
    try:
        return str(backend.name()).lower()
    except RuntimeError:  # before torch 2.8 a backend may have none
        return type(backend).__name__
