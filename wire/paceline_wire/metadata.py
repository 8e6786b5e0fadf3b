"""Keys of a job's metadata that ranks write and the server reads."""

from __future__ import annotations

CHECKPOINT_PATH = "checkpoint_path"  # where the script saves; what changes is replaced by *
TOTAL_STEPS = "total_steps"  # number of steps of the whole training
