"""All ranks act on a command at the same step.

A command reaches the control pages of the ranks at different times. In every step the ranks
exchange a short row of numbers for the loss and the gradient norm; it also has the pending command
of each rank. So all ranks receive a command at the same step boundary, and act on the latest one at
the same step: its target step, or two steps ahead if that is later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_wire.ring import AckStatus, Control, ControlKind

Acknowledge = Callable[[int, int, int], object]  # command id, AckStatus, step

LEAD_STEPS = 2
WORDS = 3
NOTHING = (0.0, 0.0, 0.0)


class Agreement:
    """One rank's side of the agreement. `step` is the number of completed steps."""

    def __init__(self, pending: Callable[[], Control | None], acknowledge: Acknowledge) -> None:
        self._pending = pending
        self._acknowledge = acknowledge
        self._newest = 0  # id of the latest command that all ranks agreed on
        self._agreed: Control | None = None

    def proposal(self) -> tuple[float, float, float]:
        """Return WORDS numbers for the exchange. Ids and steps below 2**53 are exact in float64."""
        command = self._pending()
        if command is None or command.command_id <= self._newest:
            return NOTHING
        return float(command.command_id), float(command.kind), float(command.target_step)

    def learn(self, proposals: Sequence[Sequence[float]], step: int) -> None:
        """Receive the proposals of all ranks, exchanged after `step` completed steps."""
        command_id, kind, target_step = (int(word) for word in max(map(tuple, proposals)))
        if command_id <= self._newest:
            return
        self._newest = command_id
        if kind == ControlKind.CANCEL:
            self._agreed = None
            self._acknowledge(command_id, AckStatus.DONE, step)
            return
        self._agreed = Control(command_id, kind, max(target_step, step + LEAD_STEPS))
        self._acknowledge(command_id, AckStatus.SEEN, self._agreed.target_step)

    def due(self, step: int, *, last: bool = False) -> Control | None:
        """Return the command to act on after `step` completed steps; `last`: no step follows."""
        if self._agreed is None or (step < self._agreed.target_step and not last):
            return None
        command, self._agreed = self._agreed, None
        return command

    def answer(self, command: Control, done: bool, step: int) -> None:
        """Acknowledge a command as done or failed."""
        self._acknowledge(command.command_id, AckStatus.DONE if done else AckStatus.FAILED, step)


def wants_checkpoint(command: Control) -> bool:
    return command.kind in (ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_AND_STOP)


def wants_stop(command: Control) -> bool:
    return command.kind in (ControlKind.STOP, ControlKind.CHECKPOINT_AND_STOP)
