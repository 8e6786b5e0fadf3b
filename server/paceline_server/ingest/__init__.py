"""Ingest of batches: check, append to the hot log in one transaction per group, respond."""
