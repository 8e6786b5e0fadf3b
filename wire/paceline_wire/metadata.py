"""Keys of a job's metadata that ranks write and the server reads."""

from __future__ import annotations

CHECKPOINT_PATH = "checkpoint_path"  # where the script saves; what changes is replaced by *
KUBERNETES_JOB = "kubernetes_job"  # NAMESPACE/NAME of the JobSet whose pod the rank is in
KUBERNETES_NODE = "kubernetes_node"  # Kubernetes' name of the rank's node
KUBERNETES_RESTARTS = "kubernetes_restarts"  # how often the JobSet had been restarted before
KUBERNETES_UID = "kubernetes_uid"  # uid of the JobSet; absent if the pod does not have it
OPTIMIZER_SINCE_STEP = "optimizer_since_step"  # the first step of another optimizer
REPLICA_MISMATCH = "replica_mismatch"  # JSON: replicas whose parameters differ
ROLL_BACK = "roll_back"  # the script goes back to a checkpoint before a step on request
SLURM_JOB = "slurm_job"  # id of the job whose step the rank is
SLURM_NODE = "slurm_node"  # Slurm's name of the rank's node
SLURM_RESTARTS = "slurm_restarts"  # how often Slurm had requeued the job when the rank started
TORCHRUN_LEAST_NODES = "torchrun_least_nodes"  # the first number of --nnodes; absent: not known
TORCHRUN_MAX_RESTARTS = "torchrun_max_restarts"  # how often torchrun starts the ranks again
TORCHRUN_RESTARTS = "torchrun_restarts"  # how often it has done so on the rank's node
TORCHRUN_RUN = "torchrun_run"  # the name of the job that the rank reports
TORCHRUN_SHARES_STORE = "torchrun_shares_store"  # ranks meet at torchrun's own store; else absent
TOTAL_STEPS = "total_steps"  # number of steps of the whole training
TRAINED_PARAMETERS = "trained_parameters"  # their number in the next model of the same process
TRAINED_SINCE_STEP = "trained_since_step"  # the first step of that model
