from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_trainer.data import (
    Loader,
    SampleOrder,
    Sequences,
    read_corpus,
    validation_batch,
)
from paceline_trainer.errors import TrainerSettingsError
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_wire.topology import Topology


def numbers_of_step(settings: TrainerSettings, dp: int, step: int) -> list[int]:
    topology = Topology(dp, 2, 2)
    found: list[int] = []
    for dp_rank in range(dp):
        place = RankPlacement(rank=topology.rank(dp_rank, 0, 0), topology=topology)
        found += Loader(Sequences(bytes(10_000), 16), settings, place).numbers(step)
    return found


def test_a_resume_at_another_dp_size_repeats_and_skips_no_sample(
    tiny_settings: TrainerSettings,
) -> None:
    sizes = [4] * 5 + [2] * 3 + [8] * 2  # dp of each step
    seen = [n for step, dp in enumerate(sizes) for n in numbers_of_step(tiny_settings, dp, step)]
    assert seen == list(range(10 * tiny_settings.global_batch_size))


def test_each_epoch_holds_every_sequence_once_in_its_own_order() -> None:
    order = SampleOrder(100, seed=3)
    epochs = [[order[number] for number in range(e * 100, e * 100 + 100)] for e in range(3)]
    assert all(Counter(epoch) == Counter(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = SampleOrder(100, seed=3)
    assert [again[number] for number in range(200, 300)] == epochs[2]
    assert [SampleOrder(100, seed=4)[number] for number in range(100)] != epochs[0]


def test_a_loader_that_starts_later_yields_the_same_batches(
    tiny_settings: TrainerSettings,
) -> None:
    training, _ = read_corpus(tiny_settings)
    whole = list(Loader(training, tiny_settings, RankPlacement()))
    rest = list(Loader(training, tiny_settings, RankPlacement(), start=17))
    assert len(whole) == 20
    assert [batch.tokens.tolist() for batch in rest] == [
        batch.tokens.tolist() for batch in whole[17:]
    ]


def test_a_file_is_used_for_training_or_validation_never_both(
    tmp_path: Path, tiny_settings: TrainerSettings
) -> None:
    for number in range(60):
        (tmp_path / f"file_{number}.py").write_bytes(bytes([number]) * 100)
    training, validation = read_corpus(replace(tiny_settings, data_directory=tmp_path))
    sides = [
        {byte for index in range(part.count) for byte in part[index].tolist()}
        for part in (training, validation)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) >= 59  # the very last bytes may not fill a sequence
    assert len(sides[0]) > len(sides[1])


def test_too_little_text_is_refused_in_one_sentence(
    tmp_path: Path, tiny_settings: TrainerSettings
) -> None:
    with pytest.raises(TrainerSettingsError, match="too little Python source"):
        read_corpus(replace(tiny_settings, data_directory=tmp_path))


def test_validation_is_spread_over_the_text_and_over_dp_ranks(
    tiny_settings: TrainerSettings,
) -> None:
    text = Sequences(bytes(n // 16 % 256 for n in range(16 * 200 + 1)), 16)
    topology = Topology(2, 1, 1)
    batches = [
        validation_batch(text, tiny_settings, RankPlacement(rank=rank, topology=topology))
        for rank in range(2)
    ]
    firsts = [int(row[0]) for batch in batches for row in batch.tokens.flatten(0, 1)]
    assert firsts == [number * 25 for number in range(8)]


def test_lengths_spread_exactly_as_configured(tiny_settings: TrainerSettings) -> None:
    text = Sequences(bytes(60 * 1000 + 1), 60, spread=3.0)
    assert text.lengths.min() == 20
    assert text.lengths.max() == 60
    assert Sequences(bytes(10_000), 16).lengths.unique().tolist() == [16]
    batch = Loader(text, tiny_settings, RankPlacement()).batch(3)
    assert batch.lengths.shape == batch.tokens.shape[:2]
    assert len(batch.lengths.unique()) > 1
