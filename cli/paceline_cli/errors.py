"""Errors of the command line that end a command with one sentence."""

from __future__ import annotations

import click


class BadRecording(click.ClickException):
    """A recording that cannot be read, or a report that cannot be written."""

    exit_code = 2
