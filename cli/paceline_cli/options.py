"""Options shared by several commands."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline_wire.address import DEFAULT_SERVER_URL


class OutputFile(click.Path):
    """A file that is written at the end; an unusable path is rejected at the start."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not os.path.isdir(folder):
            self.fail(f"there is no folder {folder}", param, ctx)
        if not os.path.exists(path) and not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"nothing can be written into {folder}", param, ctx)
        return path


class ResourceId(click.types.StringParamType):
    """The id of a job, incident, action or node, which is one part of an address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(super().convert(value, param, ctx))
        if text in ("", ".", "..") or "/" in text:
            self.fail(f"expected an id as the list shows it, got {text!r}", param, ctx)
        return text


class Seconds(click.FloatRange):
    """A finite number in a range: click's own range accepts NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"expected seconds, got {value}", param, ctx)
        return seconds


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def server_options(command: Decorated) -> Decorated:
    """Add --server and --token; the command receives `server` and `token`."""
    command = click.option(
        "--token",
        envvar="PACELINE_TOKEN",
        help="Bearer token; for a server of this user on this machine none is needed.  "
        "[env: PACELINE_TOKEN]",
    )(command)
    return click.option(
        "--server",
        envvar="PACELINE_SERVER",
        default=DEFAULT_SERVER_URL,
        show_default=True,
        help="Address of the server.  [env: PACELINE_SERVER]",
    )(command)


def json_option(command: Decorated) -> Decorated:
    """Add --json; the command receives `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def steps_option(command: Decorated) -> Decorated:
    """Add --steps; the command receives `steps`."""
    return click.option(
        "--steps",
        type=click.IntRange(1, 100),
        default=8,
        show_default=True,
        help="Number of the job's last steps to analyze.",
    )(command)
