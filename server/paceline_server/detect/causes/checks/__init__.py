"""The checks: one file each, one part of a node. `diagnose.py` asks them all."""
