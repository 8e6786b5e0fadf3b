"""The operation types of a training step and how the analysis treats them."""

from __future__ import annotations

FORWARD_COMPUTE = "forward-compute"
BACKWARD_COMPUTE = "backward-compute"
BACKWARD_WEIGHT_COMPUTE = "backward-weight-compute"  # for schedules that split the backward pass
FORWARD_SEND = "forward-send"
FORWARD_RECV = "forward-recv"
BACKWARD_SEND = "backward-send"
BACKWARD_RECV = "backward-recv"
PARAMS_ALL_GATHER = "params-all-gather"
GRADS_REDUCE_SCATTER = "grads-reduce-scatter"
SEPARATE_ALL_REDUCE = "separate-grads-all-reduce"
LAYERNORM_ALL_REDUCE = "layernorm-grads-all-reduce"
EMBEDDING_ALL_REDUCE = "embedding-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"
GC = "gc"
DATA_WAIT = "data-wait"

COMPUTE = (FORWARD_COMPUTE, BACKWARD_COMPUTE, BACKWARD_WEIGHT_COMPUTE)
TRANSFERS = (FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV)

# These wait for the same operation of every data-parallel rank.
SYNCHRONIZED = frozenset({PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER, SEPARATE_ALL_REDUCE, CLIP})

# For these only the transfer duration counts: the recorded one includes waiting for other ranks.
# The layernorm all-reduce has no partners in this model, so its recorded duration counts.
TRANSFERRING = SYNCHRONIZED | {*TRANSFERS, EMBEDDING_ALL_REDUCE}

# The ideal duration of these is the median: an outlier in communication or data wait is congestion,
# not work. For other types it is the mean, because the total amount of work stays the same.
IDEAL_IS_MEDIAN = TRANSFERRING | {LAYERNORM_ALL_REDUCE, DATA_WAIT}

KNOWN = frozenset({*COMPUTE, OPTIMIZER, GC}) | IDEAL_IS_MEDIAN

# Send and receive are reported as one group: a slow link slows both of its ends.
GROUPS = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}


def group(optype: str) -> str:
    """Return the name under which an operation type is reported."""
    return GROUPS.get(optype, optype)
