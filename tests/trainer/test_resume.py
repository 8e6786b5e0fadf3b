"""A run that stops and resumes equals the run that never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoints.layout import DAMAGED, saved_checkpoints
from paceline_trainer.settings import TrainerSettings
from paceline_wire.topology import Topology


@pytest.fixture(scope="module")
def settings(tiny_settings: TrainerSettings) -> TrainerSettings:
    return replace(tiny_settings, steps=12, evaluate_every=0, checkpoint_every=3)


@pytest.fixture(scope="module")
def unbroken(ranks_pool: Any, settings: TrainerSettings) -> list[float]:
    losses: list[float] = ranks_pool.run(settings, Topology(2, 1, 2)).losses
    return losses


@pytest.mark.campaign
def test_a_resume_at_another_dp_size_continues_the_loss_curve(
    ranks_pool: Any, settings: TrainerSettings, unbroken: list[float], tmp_path: Path
) -> None:
    settings = replace(settings, checkpoint_directory=tmp_path)
    first = ranks_pool.run(replace(settings, steps=5), Topology(2, 1, 2))
    smaller = ranks_pool.run(replace(settings, steps=8), Topology(1, 1, 2), generation=1)
    larger = ranks_pool.run(settings, Topology(4, 1, 2), generation=2)
    assert [first.first_step, smaller.first_step, larger.first_step] == [0, 5, 8]
    together = first.losses + smaller.losses + larger.losses
    assert together == pytest.approx(unbroken, rel=0, abs=1e-9)


def test_a_resume_with_other_stages_chunks_and_zero_continues_the_loss_curve(
    ranks_pool: Any, settings: TrainerSettings, tmp_path: Path
) -> None:
    settings = replace(settings, model=replace(settings.model, layers=4))
    expected = ranks_pool.run(settings, Topology(1, 1, 1)).losses
    settings = replace(settings, checkpoint_directory=tmp_path)
    parts = [
        (
            Topology(2, 2, 1),
            {"steps": 4, "schedule": "interleaved", "virtual_stages": 2, "zero": 1},
        ),
        (Topology(1, 4, 1), {"steps": 8}),
        (Topology(4, 2, 1), {"stage_layers": (3, 1), "zero": 1}),
    ]
    losses: list[float] = []
    for generation, (topology, how) in enumerate(parts):
        outcome = ranks_pool.run(replace(settings, **how), topology, generation=generation)
        assert outcome.first_step == len(losses)
        losses += outcome.losses
    assert losses == pytest.approx(expected, rel=0, abs=1e-9)


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(
    ranks_pool: Any, settings: TrainerSettings, unbroken: list[float], tmp_path: Path
) -> None:
    settings = replace(settings, checkpoint_directory=tmp_path)
    ranks_pool.run(replace(settings, steps=9), Topology(2, 1, 2))
    newest = saved_checkpoints(tmp_path)[0]
    assert newest.step == 9
    shard = next((tmp_path / newest.name).glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    outcome = ranks_pool.run(settings, Topology(2, 1, 2))
    assert outcome.first_step == 6
    assert outcome.losses == pytest.approx(unbroken[6:], rel=0, abs=1e-9)
    assert (tmp_path / f"{DAMAGED}{newest.name}").is_dir()
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [12, 9, 6]


def test_an_older_generation_is_refused(
    ranks_pool: Any, settings: TrainerSettings, tmp_path: Path
) -> None:
    settings = replace(settings, checkpoint_directory=tmp_path, steps=1)
    ranks_pool.run(settings, Topology(2, 1, 1), generation=3)
    for failure in ranks_pool.start(settings, Topology(2, 1, 1), generation=2).failures():
        assert "generation 3 has taken over" in failure


def test_another_runs_checkpoints_are_refused(
    ranks_pool: Any, settings: TrainerSettings, tmp_path: Path
) -> None:
    settings = replace(settings, checkpoint_directory=tmp_path, steps=1)
    ranks_pool.run(settings, Topology(2, 1, 1))
    for failure in ranks_pool.start(replace(settings, seed=9), Topology(2, 1, 1)).failures():
        assert "use another directory or the same settings" in failure
