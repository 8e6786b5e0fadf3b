"""Hosts that are too busy for a verdict about slow ranks."""
