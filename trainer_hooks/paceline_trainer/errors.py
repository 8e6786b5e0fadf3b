"""The errors of the trainer; those of its checkpoints are `paceline.checkpoints.errors`.

TrainerError
├── TrainerSettingsError the settings are not valid; the message says how to fix them
└── GpuLostError         the (emulated) GPU of this rank is lost
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the tree; the message is one sentence for the user."""


class TrainerSettingsError(TrainerError):
    pass


class GpuLostError(TrainerError):
    pass
