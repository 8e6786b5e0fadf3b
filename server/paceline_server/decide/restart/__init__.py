"""Restarts and first starts, one module per phase: checkpoint, stop, place, start (and observe)."""
