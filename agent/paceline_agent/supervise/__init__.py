"""The ranks of this node: start, watch, stop."""
