"""Checks before a large run: facts of every node and comparisons between them."""
