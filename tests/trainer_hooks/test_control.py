"""Commands from the agent, and responses to it."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline import AckStatus, ControlKind
from paceline_wire.ring import Acknowledgement, RingReader


def test_nothing_is_pending_at_first(reader: RingReader) -> None:
    assert paceline.pending() is None
    assert reader.acknowledgement() is None


def test_a_command_is_pending_until_it_has_a_final_answer(reader: RingReader) -> None:
    reader.command(7, ControlKind.CHECKPOINT_AND_STOP, 120)
    command = paceline.pending()
    assert command is not None
    assert (command.command_id, command.kind, command.target_step) == (7, 2, 120)
    paceline.acknowledge(7, AckStatus.SEEN, 118)
    assert paceline.pending() == command
    assert reader.acknowledgement() == Acknowledgement(7, AckStatus.SEEN, 118)
    paceline.acknowledge(7, AckStatus.DONE, 120)
    assert paceline.pending() is None
    assert reader.acknowledgement() == Acknowledgement(7, AckStatus.DONE, 120)


def test_a_newer_command_replaces_the_one_pending(reader: RingReader) -> None:
    reader.command(7, ControlKind.CHECKPOINT, 120)
    paceline.pending()
    reader.command(8, ControlKind.STOP, 130)
    command = paceline.pending()
    assert command is not None
    assert (command.command_id, command.kind) == (8, ControlKind.STOP)


def test_the_same_command_written_again_stays_answered(reader: RingReader) -> None:
    reader.command(7, ControlKind.CHECKPOINT, 120)
    paceline.acknowledge(7, AckStatus.FAILED, 120)
    reader.command(7, ControlKind.CHECKPOINT, 120)
    assert paceline.pending() is None


def test_an_answer_that_does_not_fit_its_word_raises_nothing(reader: RingReader) -> None:
    paceline.acknowledge(-1, AckStatus.DONE, 1)
    assert reader.acknowledgement() is None


def test_a_script_declares_what_it_can_do(reader: RingReader) -> None:
    assert (reader.view().can_checkpoint, reader.view().can_stop) == (False, False)
    paceline.declare(checkpoint=True, stop=True)
    assert (reader.view().can_checkpoint, reader.view().can_stop) == (True, True)
    paceline.declare(stop=True)
    assert (reader.view().can_checkpoint, reader.view().can_stop) == (False, True)


def test_checkpoints_and_their_failures_are_reported_with_the_reason(reader: RingReader) -> None:
    view = reader.view()
    assert (view.saved_step, view.failed_saves, view.save_failure) == (None, 0, None)
    paceline.checkpoint_saved(0)
    assert reader.view().saved_step == 0
    paceline.checkpoint_failed("[Errno 28] No space left on device" + " and more" * 100)
    paceline.checkpoint_failed("Stale file handle")
    view = reader.view()
    assert (view.saved_step, view.failed_saves, view.save_failure) == (0, 2, "Stale file handle")


def test_a_reported_checkpoint_is_shown_with_its_path(reader: RingReader) -> None:
    for step in (5, 10):
        paceline.checkpoint_saved(step, Path(f"/ckpt/step-{step}"))
    assert reader.view().saved_step == 10
    metadata = [each.metadata for each in reader.new_descriptions()]
    assert {"checkpoint_path": "/ckpt/step-*"} in metadata


def test_values_that_cannot_be_reported_raise_nothing(reader: RingReader) -> None:
    paceline.checkpoint_saved("soon")  # type: ignore[arg-type]
    paceline.checkpoint_failed(object())  # type: ignore[arg-type]
    paceline.declare(checkpoint="yes", stop=None)  # type: ignore[arg-type]
    assert reader.view().saved_step is None
