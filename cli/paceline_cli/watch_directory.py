"""The directory that `paceline watch` has for a node, below the state of its user."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from paceline_wire.local_token import state_directory

DATABASE = "watch.db"
RESULT = "result.json"  # see `watched.py`
# Rings of the agent that was started with a server, whose trainings are in the file.
RECORDED = "recorded"
WANTED = f"{RESULT}.wanted"  # a command that an error ends waits for the result, see `result.py`


def watch_directory(environment: Mapping[str, str]) -> Path:
    """Return it: one for each node, because nodes often share the home directory.

    Raises OSError if the user has no home directory.
    """
    return state_directory(environment) / "watch" / socket.gethostname()
