"""Measured claims: `python -m benchmarks [NAME ...] [--json bench.json]`.

Each module beside this one is a benchmark by being there: its `measure()` yields results. Each
runs in a process of its own, so that one which fails, hangs or kills itself spoils no other.
"""
