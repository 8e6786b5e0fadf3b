"""Local output of the agent: /metrics, --once, --check."""
