"""What the agent shows locally: /metrics, --once, --check."""
