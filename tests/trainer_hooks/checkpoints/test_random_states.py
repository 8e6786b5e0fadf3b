"""Random states: the generators continue where they were, from checkpoints of any release."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoints.random_states import OwnGenerator, RandomStates
from paceline.checkpoints.trees import decode, serialize


def draw() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, *torch.rand(3).tolist()]


def of_an_earlier_release() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    numpy_state = (name, [int(key) for key in keys], int(rest[0]), int(rest[1]), float(rest[2]))
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": numpy_state}


@pytest.mark.parametrize("state_of", [RandomStates().state_dict, of_an_earlier_release])
def test_generators_continue_where_they_were(state_of: Any) -> None:
    draw()  # leaves a second normal number for the next call
    saved = decode(serialize(state_of()))
    expected = draw()
    draw()
    RandomStates().load_state_dict(saved)
    assert draw() == expected


@pytest.mark.parametrize(
    "generator",
    [
        random.Random(1),
        np.random.default_rng(1),
        np.random.Generator(np.random.MT19937(1)),
        np.random.Generator(np.random.Philox(1)),
        np.random.RandomState(1),
    ],
)
def test_generators_of_the_script_continue_where_they_were(generator: Any) -> None:
    assert OwnGenerator.fits(generator)
    saved = decode(serialize(OwnGenerator(generator).state_dict()))
    expected = generator.random()
    generator.random()
    OwnGenerator(generator).load_state_dict(saved)
    assert generator.random() == expected
