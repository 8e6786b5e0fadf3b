"""The operation types of a training step, and how each is treated."""

from __future__ import annotations

FORWARD_COMPUTE = "forward-compute"
BACKWARD_COMPUTE = "backward-compute"
BACKWARD_WEIGHT_COMPUTE = "backward-weight-compute"  # where a schedule splits backwards in two
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

# Their transfer duration, not their recorded one, is what they cost: waiting is not their fault.
# The layernorm all-reduce couples nobody in this model, so its recorded duration counts.
TRANSFERRING = SYNCHRONIZED | {*TRANSFERS, EMBEDDING_ALL_REDUCE}

# Ideal: the mean for what computes (one microbatch's work has to be done by someone), the median
# for what communicates or waits for data (an outlier is congestion, no work).
IDEAL_IS_MEDIAN = TRANSFERRING | {LAYERNORM_ALL_REDUCE, DATA_WAIT}

KNOWN = frozenset({*COMPUTE, OPTIMIZER, GC}) | IDEAL_IS_MEDIAN

# The four pipeline transfers are judged as two: both ends of a link see the same slowness.
GROUPS = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}


def group(optype: str) -> str:
    """The name under which an operation type is judged."""
    return GROUPS.get(optype, optype)
