"""The CUDA device that the script uses, found without a change of it."""

from __future__ import annotations

import sys
from typing import Any


def initialized_cuda() -> Any | None:
    """Return `torch.cuda` if the script has created a context; creating one here could use the
    wrong GPU."""
    cuda = sys.modules.get("torch.cuda")
    return cuda if cuda is not None and cuda.is_initialized() else None


def device_in_use(cuda: Any) -> int | None:
    """Return the index of the device on which this process holds most memory, or None.

    A script need not make its device the current one: `model.to(rank)` is enough for DDP. An event
    on another device measures nothing, and creates a context there that takes hundreds of MB.

    `cuda`: `torch.cuda`, initialized. The statistics are the host's: they need no context.
    """
    try:
        held = [cuda.memory_allocated(index) for index in range(cuda.device_count())]
    except RuntimeError:  # an allocator that has no statistics
        return int(cuda.current_device())
    most = max(held, default=0)
    return held.index(most) if most else None
