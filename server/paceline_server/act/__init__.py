"""Carry out committed actions: commands to agents, alerts to receivers."""
