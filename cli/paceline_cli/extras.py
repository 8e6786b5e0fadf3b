"""Import of modules that an optional extra installs."""

from __future__ import annotations

import importlib
from types import ModuleType

import click


def load(module: str, command: str, extra: str | None) -> ModuleType:
    """Import `module` for `paceline COMMAND`; a click.ClickException names a missing extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("paceline"):
            raise
        raise click.ClickException(
            f"`paceline {command}` needs the module {error.name}: pip install 'paceline[{extra}]'"
        ) from error
