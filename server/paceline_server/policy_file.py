"""The server's policy file: TOML, one `field = value` per line, defaults for new jobs."""

from __future__ import annotations

import tomllib
from pathlib import Path

from paceline_server.policy import Policy, PolicyError, parse_policy


def load_policy(path: Path | None) -> Policy:
    """Return the policy of the file; the defaults without one. Raises PolicyError."""
    if path is None:
        return Policy()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"the policy file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise PolicyError(f"the policy file {path} is not valid TOML: {error}") from error
    try:
        return parse_policy(values)
    except PolicyError as error:
        raise PolicyError(f"policy file {path}: {error}") from error
