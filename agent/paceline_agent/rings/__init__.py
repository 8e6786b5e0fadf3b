"""Read the ring files of this node's ranks, and their Python stacks."""
