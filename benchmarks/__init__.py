"""Measured claims: `python -m benchmarks [NAME ...] [--json bench.json]`.

Each module in this directory is a benchmark: its `measure()` yields results. Each benchmark runs in
its own process, so that one that fails or hangs does not affect the others.
"""
