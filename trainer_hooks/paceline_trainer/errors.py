"""The errors of the trainer.

TrainerError
├── TrainerSettingsError the settings are not valid; the message says how to fix them
├── GpuLostError         the (emulated) GPU of this rank is lost
└── CheckpointError      a checkpoint could not be written
    ├── DamagedError     a committed checkpoint was read and does not match its manifest
    └── UnreadableError  this rank cannot read the checkpoints, which may be intact
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the tree; the message is one sentence for the user."""


class TrainerSettingsError(TrainerError):
    pass


class GpuLostError(TrainerError):
    pass


class CheckpointError(TrainerError):
    pass


class DamagedError(CheckpointError):
    pass


class UnreadableError(CheckpointError):
    pass
