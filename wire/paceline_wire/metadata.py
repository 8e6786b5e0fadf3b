"""Keys of a job's metadata that ranks write and the server reads."""

from __future__ import annotations

CHECKPOINT_PATH = "checkpoint_path"  # where the script saves; what changes is replaced by *
SLURM_JOB = "slurm_job"  # id of the job whose step the rank is
SLURM_NODE = "slurm_node"  # Slurm's name of the rank's node
SLURM_RESTARTS = "slurm_restarts"  # how often Slurm had requeued the job when the rank started
TOTAL_STEPS = "total_steps"  # number of steps of the whole training
