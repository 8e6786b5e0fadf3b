"""Options shared by the commands for jobs, incidents, actions and nodes of a server."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from paceline_cli.client import Client


class ClientGroup(click.Group):
    """A group of commands about resources of a server; `ctx.obj` is a `Client`.

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


def server_option(ctx: click.Context, client: Client) -> str:
    """Return ` --server URL` if other commands need it, else an empty string."""
    named = ctx
    while "server" not in named.params and named.parent is not None:
        named = named.parent
    given = named.get_parameter_source("server") is ParameterSource.COMMANDLINE
    other = client.server != str(named.params["server"]).rstrip("/")
    return f" --server {client.server}" if given or other else ""


def _other_client(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        before: Client = ctx.obj
        if option.name == "server":
            other = Client(value, before.token)
        else:
            other = Client(before.server, value)
        ctx.obj = ctx.with_resource(other)
