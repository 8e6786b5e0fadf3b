"""Which device the script uses; the modules have the functions of `torch.cuda` that are called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.cuda import device_in_use


@pytest.mark.parametrize(
    ("allocated", "device"),
    [
        pytest.param([0, 0, 700, 20], 2, id="model.to(2), and device 0 is the current one"),
        pytest.param([0, 0], None, id="not used yet"),
        pytest.param([], None, id="no device"),
    ],
)
def test_the_device_that_holds_most_memory_is_in_use(
    allocated: list[int], device: int | None
) -> None:
    cuda = SimpleNamespace(
        device_count=lambda: len(allocated), memory_allocated=allocated.__getitem__
    )
    assert device_in_use(cuda) == device


def test_an_allocator_without_statistics_leaves_the_current_device() -> None:
    def memory_allocated(_: int) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    cuda = SimpleNamespace(
        device_count=lambda: 2, memory_allocated=memory_allocated, current_device=lambda: 1
    )
    assert device_in_use(cuda) == 1
