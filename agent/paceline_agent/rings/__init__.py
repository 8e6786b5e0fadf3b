"""Reading the ring files of this node's ranks."""
