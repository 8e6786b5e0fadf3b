"""Descriptions that a session adds to its rank after `init`."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline import hooks
from paceline.session import Session
from paceline_wire.ring import RingReader
from paceline_wire.topology import Coordinates, Topology


@pytest.fixture
def session(reader: RingReader) -> Session:
    """The session; what `init` itself added to its rank is read."""
    reader.new_descriptions()
    assert hooks._session is not None
    return hooks._session


def test_what_is_new_is_reported_once(reader: RingReader, session: Session) -> None:
    session.update(metadata={"steps": "optimizer"})
    session.update(metadata={"steps": "optimizer"})
    session.update(source="DeviceMesh", topology=Topology(2), coordinates=Coordinates(1))
    session.update(source="DeviceMesh", topology=Topology(2), coordinates=Coordinates(1))
    first, second = reader.new_descriptions()
    assert (first.metadata, first.topology) == ({"steps": "optimizer"}, None)
    assert (second.metadata, second.coordinates) == ({}, Coordinates(1))


def test_what_the_script_passed_stays(reader: RingReader, session: Session) -> None:
    session.given = frozenset({"schedule"})
    session.update(metadata={"schedule": "gpipe", "microbatches": "4"})
    assert [each.metadata for each in reader.new_descriptions()] == [{"microbatches": "4"}]


def test_a_full_area_is_no_error(reader: RingReader, session: Session) -> None:
    for number in range(20):
        session.update(metadata={"long": f"{number}" * 1000})
    assert 0 < len(reader.new_descriptions()) < 20
    assert not session.recorder.failures


def train(*widths: int, steps: int = 3) -> None:
    """Train models, each with an optimizer of its own, in all steps of one loop."""
    models = [torch.nn.Linear(width, 1) for width in widths]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in paceline.steps(range(steps)):
        for width, model, optimizer in zip(widths, models, optimizers, strict=True):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()


def trained(reader: RingReader) -> list[dict[str, str]]:
    """Return what was reported about other models and optimizers."""
    found = [each.metadata for each in reader.new_descriptions()]
    return [each for each in found if any(key.endswith("_since_step") for key in each)]


@pytest.mark.usefixtures("session")
def test_another_model_in_the_same_process_is_reported(reader: RingReader) -> None:
    for width in (7, 7, 15, 7):  # the second is the same model again
        train(width)
    assert trained(reader) == [
        {"optimizer_since_step": "3"},
        {"trained_parameters": "16", "trained_since_step": "6"},
        {"trained_parameters": "8", "trained_since_step": "9"},
    ]


@pytest.mark.usefixtures("session")
def test_several_optimizers_train_one_model(reader: RingReader) -> None:
    train(7, 15)
    train(7, 15)
    assert trained(reader) == [{"optimizer_since_step": "3"}]


def test_only_so_many_models_are_reported(reader: RingReader, session: Session) -> None:
    for width in range(1, 40):
        train(width, steps=1)
    assert len(trained(reader)) == 24
    assert not session.recorder.failures
