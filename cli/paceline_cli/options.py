"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline_cli.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8470"

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def server_options(command: Decorated) -> Decorated:
    """Add --server and --token, handed to the command as `server` and `token`."""
    command = click.option(
        "--token", envvar="PACELINE_TOKEN", help="Bearer token.  [env: PACELINE_TOKEN]"
    )(command)
    return click.option(
        "--server",
        envvar="PACELINE_SERVER",
        default=DEFAULT_SERVER,
        show_default=True,
        help="Address of the server.  [env: PACELINE_SERVER]",
    )(command)


def json_option(command: Decorated) -> Decorated:
    """Add --json, handed to the command as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(
        command
    )


class ClientGroup(click.Group):
    """Commands about what a server holds: `ctx.obj` is a `Client`.

    --server, --token and --json may stand before the subcommand or after it.
    """

    def add_command(self, command: click.Command, name: str | None = None) -> None:
        for option, text in (("--server", "Address of the server."), ("--token", "Bearer token.")):
            command.params.append(
                click.Option([option], expose_value=False, callback=_other_client, help=text)
            )
        super().add_command(command, name)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("as_json"):
            ctx.default_map = {name: {"as_json": True} for name in self.commands}
        return super().invoke(ctx)


def _other_client(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        before: Client = ctx.obj
        if option.name == "server":
            ctx.obj = Client(value, before.token)
        else:
            ctx.obj = Client(before.server, value)


def steps_option(command: Decorated) -> Decorated:
    """Add --steps, handed to the command as `steps`."""
    return click.option(
        "--steps",
        type=click.IntRange(1, 100),
        default=8,
        show_default=True,
        help="How many of a job's last steps.",
    )(command)
