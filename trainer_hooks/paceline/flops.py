"""Counts the FLOPs of one step with the formulas of torch's FLOP counter, if a setting asks for it.

The counted step is slower, because each operation passes through Python.
"""

from __future__ import annotations

import sys
from typing import Any

COUNTED_STEP = 4  # counts from 0 in this process: after lazy initialization


class FlopCount:
    """A count of the operations that this thread and its backward passes execute.

    Each operation is executed exactly as without the counter; an error of a formula is ignored.
    """

    def __init__(self) -> None:
        self._mode: Any = _mode_class()()
        self._mode.__enter__()

    def end(self) -> int | None:
        """Stop counting. Return the FLOPs; None if another mode was entered meanwhile, and stays.

        Call it again at the next step boundary then.
        """
        self._mode.is_counting = False
        current = sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode()
        if current is not self._mode:
            return None
        self._mode.__exit__(None, None, None)
        flops: int = self._mode.flops
        return flops


def _mode_class() -> Any:
    # torch is loaded, but the hooks do not depend on it.
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

    tensors = sys.modules.get("torch.distributed.tensor")
    sharded = getattr(tensors, "DTensor", None)

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.flops = 0
            self.is_counting = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if sharded is not None and any(issubclass(each, sharded) for each in types):
                return NotImplemented  # the operations on its local shard are counted
            result = func(*args, **(kwargs or {}))
            if self.is_counting:
                try:
                    formula = flop_registry.get(func._overloadpacket)
                    if formula is not None:
                        self.flops += formula(*args, **(kwargs or {}), out_val=result)
                except Exception:  # an operation without a shape that the formula knows
                    pass
            return result

    return Mode
