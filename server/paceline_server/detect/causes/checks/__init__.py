"""The checks: each module reads the metrics of one part of a node."""
