"""The HTTP header with which an agent proves that it is the agent of its node."""

HEADER = "x-paceline-node-key"
"""Header name. Its value is the node's key, which the agent makes at its first start."""
