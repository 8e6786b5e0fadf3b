"""Collectors and what runs them: each reads one part of the node."""
