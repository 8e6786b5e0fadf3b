"""Batches in, hot log out: check, then append in one transaction per group, then answer."""
