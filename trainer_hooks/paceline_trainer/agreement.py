"""How all ranks act on a command at the same step.

A command reaches each rank's control page at its own moment. Every step the ranks exchange one
short row of numbers, which they need for the loss and the gradient norm anyway, and it carries
what each has pending. So all of them learn of a command at the same boundary, and act on the
newest at the same step: its target, or two steps ahead if that is later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_wire.ring import AckStatus, Control, ControlKind

Acknowledge = Callable[[int, int, int], object]  # command id, AckStatus, step

LEAD_STEPS = 2
WORDS = 3
NOTHING = (0.0, 0.0, 0.0)


class Agreement:
    """One rank's end of it. `step` is the number of steps completed, here and in commands."""

    def __init__(self, pending: Callable[[], Control | None], acknowledge: Acknowledge) -> None:
        self._pending = pending
        self._acknowledge = acknowledge
        self._newest = 0  # id of the newest command agreed on
        self._agreed: Control | None = None

    def proposal(self) -> tuple[float, float, float]:
        """WORDS numbers for the exchange; float64 holds ids and steps exactly below 2**53."""
        command = self._pending()
        if command is None or command.command_id <= self._newest:
            return NOTHING
        return float(command.command_id), float(command.kind), float(command.target_step)

    def learn(self, proposals: Sequence[Sequence[float]], step: int) -> None:
        """Take in every rank's proposal, exchanged in the step after `step` completed ones."""
        command_id, kind, target_step = (int(word) for word in max(map(tuple, proposals)))
        if command_id <= self._newest:
            return
        self._newest = command_id
        self._agreed = Control(command_id, kind, max(target_step, step + LEAD_STEPS))
        self._acknowledge(command_id, AckStatus.SEEN, self._agreed.target_step)

    def due(self, step: int, *, last: bool = False) -> Control | None:
        """The command to act on now that `step` steps are completed (the `last` ones, perhaps)."""
        if self._agreed is None or (step < self._agreed.target_step and not last):
            return None
        command, self._agreed = self._agreed, None
        return command

    def answer(self, command: Control, done: bool, step: int) -> None:
        self._acknowledge(command.command_id, AckStatus.DONE if done else AckStatus.FAILED, step)


def wants_checkpoint(command: Control) -> bool:
    return command.kind in (ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_AND_STOP)


def wants_stop(command: Control) -> bool:
    return command.kind in (ControlKind.STOP, ControlKind.CHECKPOINT_AND_STOP)
