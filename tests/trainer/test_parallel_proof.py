"""The training result does not depend on how the model is divided and scheduled."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline_trainer.data import Loader, TokenBatch, read_corpus, validation_batch
from paceline_trainer.model import Chunk, initialize, shards
from paceline_trainer.optimizer import BETAS, EPSILON
from paceline_trainer.parallel import TensorParallel
from paceline_trainer.settings import RankPlacement, TrainerSettings
from paceline_trainer.train import TrainingResult
from paceline_wire.topology import Topology

# (2, 2, 2) uses the whole pool; the others run in parallel, each on its own members.
FIRST_MEMBER = {
    Topology(1, 1, 1): 0,
    Topology(2, 1, 1): 1,
    Topology(1, 2, 1): 3,
    Topology(1, 1, 2): 5,
}
ALL = [*FIRST_MEMBER, Topology(2, 2, 2)]
TOLERANCE = 1e-5


class Plain(NamedTuple):
    """The result of training in one process with torch's own optimizer."""

    losses: list[float]
    gradient_norms: list[float]
    held_back_loss: float  # at the end of the run


@functools.cache
def plain(settings: TrainerSettings) -> Plain:
    """Train the whole model and batch in one process, without the trainer's parallelism, schedules,
    padding, clipping or optimizer."""
    torch.set_num_threads(1)  # like the ranks: more threads would only wait for one another
    training, validation = read_corpus(settings)
    model = Chunk(settings.model, TensorParallel(), torch.float64)
    initialize(model, TensorParallel(), settings.seed)
    parameters = [parameter for _, parameter, _ in shards(model)]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=settings.weight_decay,
    )
    losses, norms = [], []
    for step, batch in enumerate(Loader(training, settings, RankPlacement())):
        loss = _mean_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(
            float(torch.nn.utils.clip_grad_norm_(parameters, settings.gradient_clip, norm_type=2))
        )
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        held_back = _mean_loss(model, validation_batch(validation, settings, RankPlacement()))
    return Plain(losses, norms, held_back.item())


def _mean_loss(model: Chunk, batch: TokenBatch) -> Tensor:
    """Return the mean loss over sequences, each processed alone if lengths differ, so without
    padding."""
    rows, lengths = batch.tokens.flatten(0, 1), batch.lengths.flatten().tolist()
    if len(set(lengths)) == 1:
        whole: Tensor = model(rows[:, :-1], rows[:, 1:])
        return whole
    losses = [
        model(row[None, :length], row[None, 1 : length + 1])
        for row, length in zip(rows, lengths, strict=True)
    ]
    return torch.stack(losses).mean()


def _trained_like(
    outcomes: list[TrainingResult], settings: TrainerSettings, topology: Topology
) -> None:
    expected = plain(settings)
    for rank, outcome in enumerate(outcomes):
        where = f"{topology}, rank {rank}"
        assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE), where
        assert outcome.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-6), where
    if topology.dp == 1:  # more dp ranks evaluate more held-back sequences
        held_back = outcomes[0].evaluation_losses[settings.steps]
        assert held_back == pytest.approx(expected.held_back_loss, abs=TOLERANCE)


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.campaign), "1f1b"])
def test_every_division_of_the_model_trains_like_one_process(
    ranks_pool: Any, tiny_settings: TrainerSettings, schedule: str
) -> None:
    settings = replace(tiny_settings, schedule=schedule)
    runs = {
        topology: ranks_pool.start(settings, topology, first=first)
        for topology, first in FIRST_MEMBER.items()
    }
    outcomes = {topology: run.outcomes() for topology, run in runs.items()}
    outcomes[ALL[-1]] = ranks_pool.start(settings, ALL[-1]).outcomes()
    for topology in ALL:
        _trained_like(outcomes[topology], tiny_settings, topology)
    losses = plain(tiny_settings).losses
    assert losses[-1] < losses[0] - 0.5, "the proof is of a run that learns"
    assert max(plain(tiny_settings).gradient_norms) > settings.gradient_clip, "and that clips"


INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


def test_chunks_zero_uneven_stages_and_padding_train_like_one_process(
    ranks_pool: Any, tiny_settings: TrainerSettings
) -> None:
    deep = replace(tiny_settings, model=replace(tiny_settings.model, layers=4), sequence_spread=3.0)
    indivisible = replace(
        deep, global_batch_size=6
    )  # over 3 ranks, by which the number of parameters is not divisible
    at_once = [
        (deep, Topology(1, 2, 1), INTERLEAVED),
        (indivisible, Topology(3, 1, 1), {"zero": 1}),
        (deep, Topology(1, 2, 1), {"stage_layers": (3, 1), "zero": 1}),
    ]
    runs, first = [], 0
    for settings, topology, how in at_once:
        runs.append(ranks_pool.start(replace(settings, **how), topology, first=first))
        first += topology.world_size
    for run, (settings, topology, _) in zip(runs, at_once, strict=True):
        _trained_like(run.outcomes(), settings, topology)
    largest = Topology(2, 2, 2)
    outcomes = ranks_pool.start(replace(deep, **INTERLEAVED, zero=1), largest).outcomes()
    _trained_like(outcomes, deep, largest)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("topology", "layers", "how"),
    [
        (Topology(1, 4, 1), 8, INTERLEAVED),
        (Topology(1, 4, 2), 8, INTERLEAVED | {"stage_layers": (1, 1, 1, 1, 1, 1, 1, 1)}),
        (
            Topology(2, 4, 1),
            11,
            INTERLEAVED | {"zero": 1, "stage_layers": (1, 2, 1, 1, 3, 1, 1, 1)},
        ),
        (Topology(2, 2, 2), 6, {"schedule": "interleaved", "virtual_stages": 3}),
        (Topology(4, 1, 2), 2, {"zero": 1}),
        (Topology(2, 4, 1), 4, {"schedule": "gpipe", "zero": 1}),
    ],
)
def test_larger_divisions_train_like_one_process(
    ranks_pool: Any,
    tiny_settings: TrainerSettings,
    topology: Topology,
    layers: int,
    how: dict[str, Any],
) -> None:
    settings = replace(
        tiny_settings,
        model=replace(tiny_settings.model, layers=layers),
        global_batch_size=16,
        sequence_spread=2.0,
    )
    _trained_like(
        ranks_pool.start(replace(settings, **how), topology).outcomes(), settings, topology
    )


def test_held_out_loss_falls(ranks_pool: Any, tiny_settings: TrainerSettings) -> None:
    settings = replace(tiny_settings, steps=60, evaluate_every=20, dtype="float32")
    outcome = ranks_pool.run(settings, Topology(1, 2, 1))
    first, *_, last = outcome.evaluation_losses.values()
    assert last < first - 0.3
