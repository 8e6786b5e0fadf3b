"""Emulated kernels: their duration depends on the GPU's clock, as read by the real pynvml."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline_demo import fake_nvml
from paceline_trainer.emulation import Emulation, SteadyClock, start_emulation
from paceline_trainer.parallel import TensorParallel
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_wire.spans import Op

ASK = """
import sys
from paceline_trainer.emulation import NvmlClock
from paceline_trainer.errors import GpuLostError
clock = NvmlClock(1)
for _ in sys.stdin:
    try:
        print(clock.slowdown(), flush=True)
    except GpuLostError as error:
        print(error, flush=True)
"""


def test_a_kernel_takes_at_least_its_time_including_the_real_work() -> None:
    emulation = Emulation({Op.FORWARD: 0.1}, SteadyClock(), TensorParallel())
    started = time.monotonic()
    with emulation.kernel(Op.FORWARD):
        time.sleep(0.04)
    assert time.monotonic() - started >= 0.1
    assert emulation.remaining_seconds(Op.FORWARD, worked=0.04) == pytest.approx(0.06)
    assert emulation.remaining_seconds(Op.FORWARD, worked=0.3) == 0
    assert emulation.remaining_seconds(Op.BACKWARD, worked=0.0) == 0


def test_waiting_for_a_tensor_parallel_peer_does_not_count_as_kernel_time() -> None:
    parallel = TensorParallel()
    emulation = Emulation({Op.FORWARD: 0.1}, SteadyClock(), parallel)
    started = time.monotonic()
    with emulation.kernel(Op.FORWARD):
        time.sleep(0.05)
        parallel.blocked_seconds += 0.05
    assert time.monotonic() - started >= 0.15


def test_a_slower_clock_makes_kernels_longer() -> None:
    class HalfClock:
        def slowdown(self) -> float:
            return 2.0

    emulation = Emulation({Op.BACKWARD: 0.1}, HalfClock(), TensorParallel())
    assert emulation.remaining_seconds(Op.BACKWARD, worked=0.05) == pytest.approx(0.15)


def test_kernels_follow_the_clock_of_the_gpu(tmp_path: Path) -> None:
    try:
        library = fake_nvml.build(tmp_path / "library")
    except fake_nvml.CompilerMissing as error:
        pytest.skip(str(error))
    gpus = fake_nvml.FakeGpus.create(tmp_path / "state", 2)
    environment = os.environ | fake_nvml.environment(library, tmp_path / "state")
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def ask() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert ask() == "1.0"
        gpus.set(0, sm_clock_mhz=345)  # another rank's GPU
        assert ask() == "1.0"
        gpus.set(1, sm_clock_mhz=990)
        assert float(ask()) == pytest.approx(2.0)
        gpus.set(1, lost=True)
        assert ask() == "GPU 1 has fallen off the bus."


@pytest.mark.parametrize(
    ("device", "kernels", "message"),
    [
        ("cpu", (0.02, 0.04), "EMULATED kernels: each microbatch takes at least 20 ms forward"),
        ("cuda", (0.02, 0.04), "Kernels run on cuda: --emulate-kernel-ms has no effect"),
        ("cpu", None, ""),
    ],
)
def test_the_log_reports_the_emulation(
    caplog: pytest.LogCaptureFixture,
    device: str,
    kernels: tuple[float, float] | None,
    message: str,
) -> None:
    caplog.set_level(logging.INFO, "paceline_trainer")
    settings = TrainerSettings(device=device, emulated_kernel_seconds=kernels)
    emulation = start_emulation(settings, RankPlacement(), TensorParallel())
    assert bool(emulation.seconds) == (device == "cpu" and kernels is not None)
    assert message in caplog.text
