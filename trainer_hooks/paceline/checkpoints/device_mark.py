"""A mark that a GPU sets in the host's memory when it gets there.

Another thread reads it without a call of CUDA: one could break the capture of a graph.
"""

from __future__ import annotations

import torch


class DeviceMark:
    """The end of what the current stream of a GPU has to do now."""

    def __init__(self, device: torch.device) -> None:
        self._mark = torch.zeros(1, dtype=torch.uint8, pin_memory=True)
        reached = torch.ones(1, dtype=torch.uint8, device=device)
        self._mark.copy_(reached, non_blocking=True)

    @property
    def is_reached(self) -> bool:
        return bool(self._mark.item())
