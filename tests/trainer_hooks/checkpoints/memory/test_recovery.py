"""The choice of copies: one step of all ranks, or none."""

from __future__ import annotations

import pytest

from paceline.checkpoints.layout import Saved
from paceline.checkpoints.memory.directory import CopyName
from paceline.checkpoints.memory.recovery import Choice, Offer, Source, choose

RUN = "run"


def offers(*copies: tuple[int, int, int], disk: Saved | None = None, size: int = 2) -> list[Offer]:
    """Return copies of (generation, step, rank)."""
    return [Offer(CopyName(*each), RUN, size, disk) for each in copies]


def chosen(
    *nodes: list[Offer],
    disk: tuple[Saved, ...] = (),
    excluded: frozenset[Source] = frozenset(),
) -> Choice | None:
    """Return the choice of two ranks, on one node or two."""
    if len(nodes) == 1:
        return choose([nodes[0], []], [0, 0], RUN, disk, excluded)
    return choose(nodes, [0, 1], RUN, disk, excluded)


def test_the_newest_step_of_all_ranks_is_chosen() -> None:
    choice = chosen(offers((1, 8, 0), (1, 9, 0), (1, 8, 1), (1, 7, 1)))
    assert choice is not None
    assert choice.saved == Saved(1, 8)


def test_a_newer_generation_takes_precedence() -> None:
    choice = chosen(offers((1, 8, 0), (1, 8, 1), (2, 4, 0), (2, 4, 1)))
    assert choice is not None
    assert choice.saved == Saved(2, 4)


def test_steps_of_two_generations_are_not_mixed() -> None:
    assert chosen(offers((1, 8, 0), (2, 8, 1))) is None


def test_each_rank_takes_the_copy_of_its_own_node_if_there_is_one() -> None:
    choice = chosen(offers((1, 8, 0), (1, 8, 1)), offers((1, 8, 0), (1, 8, 1)))
    assert choice is not None
    assert [source.at for source in choice.sources] == [0, 1]
    bad = frozenset({choice.sources[1]})
    choice = chosen(offers((1, 8, 0), (1, 8, 1)), offers((1, 8, 0), (1, 8, 1)), excluded=bad)
    assert choice is not None
    assert [source.at for source in choice.sources] == [0, 0]


@pytest.mark.parametrize(
    ("disk", "is_chosen"),
    [
        ((), True),
        ((Saved(1, 7),), True),
        ((Saved(1, 8),), True),
        ((Saved(1, 9),), False),
        ((Saved(2, 1),), False),
    ],
)
def test_copies_older_than_the_disk_are_not_chosen(
    disk: tuple[Saved, ...], is_chosen: bool
) -> None:
    assert (chosen(offers((1, 8, 0), (1, 8, 1)), disk=disk) is not None) == is_chosen


def test_no_copy_is_chosen_after_a_checkpoint_that_one_was_made_after_is_gone() -> None:
    copies = [
        *offers((1, 4, 0), (1, 4, 1), disk=Saved(1, 3)),
        *offers((1, 8, 0), (1, 8, 1), disk=Saved(1, 6)),
    ]
    assert chosen(copies, disk=(Saved(1, 3),)) is None
    assert chosen(copies, disk=(Saved(1, 6), Saved(1, 3))) is not None


def test_copies_of_another_run_or_number_of_ranks_are_not_chosen() -> None:
    assert chosen(offers((1, 8, 0), (1, 8, 1), size=4)) is None
    others = [offer._replace(run="other") for offer in offers((1, 8, 0), (1, 8, 1))]
    assert chosen(others) is None
