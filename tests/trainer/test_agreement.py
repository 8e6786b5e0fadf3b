"""Ranks that receive a command at different times execute it at the same step."""

from __future__ import annotations

from paceline_trainer.agreement import Agreement
from paceline_wire.ring import AckStatus, Control, ControlKind

SEEN, DONE, FAILED = AckStatus.SEEN, AckStatus.DONE, AckStatus.FAILED


class Rank:
    """One rank's control page and its side of the agreement."""

    def __init__(self) -> None:
        self.page: Control | None = None
        self.acknowledged: list[tuple[int, int, int]] = []
        self.acted: list[tuple[int, Control]] = []
        self.agreement = Agreement(lambda: self.page, self._acknowledge)

    def _acknowledge(self, command_id: int, status: int, step: int) -> None:
        self.acknowledged.append((command_id, status, step))


def run_steps(ranks: list[Rank], first: int, last: int) -> None:
    """Exchange as the trainer does, in the steps after which `first` + 1 to `last` steps are
    completed."""
    for completed in range(first, last):
        rows = [rank.agreement.proposal() for rank in ranks]
        for rank in ranks:
            rank.agreement.learn(rows, completed)
            if command := rank.agreement.due(completed + 1):
                rank.acted.append((completed + 1, command))


def test_all_ranks_act_at_the_target_step_although_one_received_the_command() -> None:
    ranks = [Rank(), Rank(), Rank()]
    ranks[1].page = Control(7, ControlKind.CHECKPOINT, 10)
    run_steps(ranks, 4, 12)
    assert [rank.acted for rank in ranks] == [[(10, ranks[1].page)]] * 3
    assert all(rank.acknowledged == [(7, SEEN, 10)] for rank in ranks)


def test_a_target_in_the_past_becomes_two_steps_ahead() -> None:
    ranks = [Rank(), Rank()]
    ranks[0].page = Control(7, ControlKind.CHECKPOINT_AND_STOP, 3)
    run_steps(ranks, 20, 30)
    assert [[step for step, _ in rank.acted] for rank in ranks] == [[22], [22]]


def test_a_command_received_late_or_twice_is_executed_once() -> None:
    ranks = [Rank(), Rank()]
    ranks[0].page = Control(7, ControlKind.CHECKPOINT, 2)
    run_steps(ranks, 0, 5)
    ranks[1].page = ranks[0].page
    run_steps(ranks, 5, 10)
    assert [[step for step, _ in rank.acted] for rank in ranks] == [[2], [2]]


def test_the_latest_command_replaces_the_earlier_one() -> None:
    ranks = [Rank(), Rank()]
    ranks[0].page = Control(7, ControlKind.STOP, 100)
    ranks[1].page = Control(8, ControlKind.CHECKPOINT, 5)
    run_steps(ranks, 0, 10)
    assert [rank.acted for rank in ranks] == [[(5, ranks[1].page)]] * 2


def test_a_run_that_ends_before_the_target_acts_at_its_end() -> None:
    rank = Rank()
    rank.page = Control(7, ControlKind.CHECKPOINT, 100)
    run_steps([rank], 0, 10)
    command = rank.agreement.due(10, last=True)
    assert command is not None
    rank.agreement.answer(command, True, 10)
    assert rank.acknowledged[-1] == (7, DONE, 10)
    assert rank.agreement.due(10, last=True) is None


def test_large_ids_are_exchanged_exactly() -> None:
    rank = Rank()
    rank.page = Control(2**53 - 1, ControlKind.CHECKPOINT, 2**32 - 1)
    rank.agreement.learn([rank.agreement.proposal()], 0)
    assert rank.acknowledged == [(2**53 - 1, SEEN, 2**32 - 1)]


def test_a_withdrawn_command_is_executed_by_no_rank() -> None:
    ranks = [Rank(), Rank(), Rank()]
    ranks[1].page = Control(7, ControlKind.CHECKPOINT_AND_STOP, 10)
    run_steps(ranks, 4, 6)
    ranks[2].page = Control(8, ControlKind.CANCEL, 0)
    run_steps(ranks, 6, 20)
    assert all(not rank.acted for rank in ranks)
    assert [rank.acknowledged[-1] for rank in ranks] == [(8, DONE, 6)] * 3
