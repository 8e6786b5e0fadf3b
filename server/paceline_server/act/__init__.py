"""Carrying out actions whose intent is committed: commands to agents, word to the outside."""
