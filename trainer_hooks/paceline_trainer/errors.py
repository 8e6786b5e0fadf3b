"""What can go wrong in the trainer, apart from bugs.

TrainerError
├── SettingsError        the run as asked for is impossible; the message says what would be
├── GpuLostError         the (emulated) device of this rank has gone
└── CheckpointError      a checkpoint could not be written
    └── DamagedError     a committed checkpoint does not hold what its manifest says
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
