"""Injected faults: which rank applies them, when, and how an invalid file is handled."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline_trainer.data import Loader, Sequences
from paceline_trainer.emulation import Emulation, SteadyClock, start_emulation
from paceline_trainer.faults import FAULTS_FILE, Faults
from paceline_trainer.parallel import TensorParallel
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_wire.spans import Op
from paceline_wire.topology import Topology

TOPOLOGY = Topology(4, 1, 1)


def write(directory: Path, *faults: dict[str, Any]) -> None:
    (directory / FAULTS_FILE).write_text(json.dumps(faults))


def of_rank(directory: Path, rank: int) -> Faults:
    place = RankPlacement(
        rank=rank, local_rank=rank % 2, topology=TOPOLOGY, node_directory=directory
    )
    faults = Faults.on(place)
    faults.read()
    return faults


def seconds_of(act: Callable[[], object]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def test_each_rank_applies_its_own_faults(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"kind": "slow_compute", "rank": 1, "factor": 1.5},
        {"kind": "slow_compute", "local_rank": 1, "factor": 2.0},
        {"kind": "slow_link", "ranks": [0, 2], "seconds": 0.03},
        {"kind": "skip_collective", "rank": 2},
    )
    assert [of_rank(tmp_path, rank).skips_collective() for rank in range(4)].index(True) == 2
    factors = [of_rank(tmp_path, rank).kernel_factor() for rank in range(4)]
    assert factors == [1.0, 3.0, 1.0, 2.0]
    assert seconds_of(lambda: of_rank(tmp_path, 0).after_receive(2)) >= 0.03
    assert seconds_of(lambda: of_rank(tmp_path, 2).after_receive(0)) >= 0.03


def test_a_slow_link_slows_only_transfers_between_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    write(tmp_path, {"kind": "slow_link", "ranks": [0, 2], "seconds": 0.03})
    for rank, peer in [(0, 1), (1, 0), (1, 2), (2, 0)]:
        of_rank(tmp_path, rank).after_receive(peer)
    assert slept == [0.03]


def test_slow_compute_makes_kernels_longer(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "slow_compute", "rank": 1, "factor": 1.5})
    parallel = TensorParallel()
    emulation = Emulation({Op.FORWARD: 0.1}, SteadyClock(), parallel, of_rank(tmp_path, 1))
    assert emulation.remaining_seconds(Op.FORWARD, worked=0.05) == pytest.approx(0.10)
    assert emulation.remaining_seconds(Op.FORWARD, worked=0.0, share=0.5) == pytest.approx(0.075)


def test_a_stall_happens_once_per_id(tmp_path: Path) -> None:
    stall = {"kind": "stall", "rank": 0, "seconds": 0.05, "id": "a"}
    write(tmp_path, stall)
    faults = of_rank(tmp_path, 0)
    assert seconds_of(faults.before_kernel) >= 0.05
    write(tmp_path, stall, stall | {"id": "b", "seconds": 0.07})
    faults.read()
    assert seconds_of(lambda: [faults.before_kernel() for _ in range(3)]) >= 0.07
    faults.read()
    assert not faults._pauses


def test_garbage_is_collected_once_per_step(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "gc", "rank": 0, "seconds": 0.05})
    faults = of_rank(tmp_path, 0)
    pauses: list[float] = []

    def on_gc(phase: str, _: dict[str, int]) -> None:
        pauses.append(time.perf_counter() * (1 if phase == "stop" else -1))

    gc.callbacks.append(on_gc)
    try:
        faults.before_kernel()
        first = sum(pauses)
        faults.before_kernel()
    finally:
        gc.callbacks.remove(on_gc)
    assert first > 0.025, "most of it is the collector's"
    assert sum(pauses) - first < 0.01


def test_noise_uses_the_cpu(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "noise", "rank": 0, "seconds": 0.01})
    faults = of_rank(tmp_path, 0)
    before = time.process_time()
    for _ in range(20):
        faults.before_kernel()
    assert time.process_time() - before > 0.02


def test_slow_data_and_checkpoint_stalls_delay_their_rank(
    tmp_path: Path, tiny_settings: TrainerSettings
) -> None:
    write(
        tmp_path,
        {"kind": "slow_data", "rank": 0, "seconds": 0.05},
        {"kind": "checkpoint_stall", "rank": 0, "seconds": 0.04},
    )
    faults = Faults.on(RankPlacement(topology=TOPOLOGY, node_directory=tmp_path))
    loader = Loader(Sequences(bytes(10_000), 16), tiny_settings, RankPlacement(), faults=faults)
    assert seconds_of(lambda: next(iter(loader))) >= 0.05
    assert seconds_of(faults.at_checkpoint) >= 0.04
    (tmp_path / FAULTS_FILE).unlink()
    faults.read()
    assert not faults.present, "deleting the file lifts them"


@pytest.mark.parametrize(
    "content",
    ['[{"kind": "slow_data", "ra', '[{"kind": "slow_dta", "rank": 0}]', '{"kind": "gc"}', "\xff"],
)
def test_an_invalid_file_is_logged_once_and_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / FAULTS_FILE).write_text(content, encoding="latin-1")
    faults = of_rank(tmp_path, 0)
    faults.read()
    assert not faults.present
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    write(tmp_path, {"kind": "slow_data", "rank": 0, "seconds": 1})
    faults.read()
    assert faults.present


def test_only_emulated_runs_apply_faults(tmp_path: Path, tiny_settings: TrainerSettings) -> None:
    write(tmp_path, {"kind": "slow_data", "rank": 0, "seconds": 3600})
    place = RankPlacement(node_directory=tmp_path)
    real = start_emulation(tiny_settings, place, TensorParallel()).faults
    real.before_batch()
    assert not real.present
    emulated = replace(tiny_settings, emulated_kernel_seconds=(0.0, 0.0))
    faults = start_emulation(emulated, place, TensorParallel()).faults
    faults.read()
    assert faults.present
