"""The errors of checkpoints. They reach the script only at its start, when it cannot resume.

CheckpointError          the directory or a checkpoint cannot be used
├── OtherRunError        the checkpoint is of a run with other settings, or of another model
├── DamagedError         a committed checkpoint was read and does not match its manifest
└── UnreadableError      this rank cannot read the checkpoints, which may be intact
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of the tree; the message is one sentence for the user."""


class OtherRunError(CheckpointError):
    pass


class DamagedError(CheckpointError):
    pass


class UnreadableError(CheckpointError):
    pass
