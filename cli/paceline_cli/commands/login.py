"""`paceline login`: sign in a browser."""

from __future__ import annotations

import click

from paceline_cli.client import Client
from paceline_cli.options import server_options


@click.command()
@server_options
def login(server: str, token: str | None) -> None:
    """Print a link that signs in one browser, once, within ten minutes.

    The browser gets the permissions of the token that this command uses: by default the one that
    `paceline server` has created for its own user.
    """
    with Client(server, token) as client:
        link = client.post("/login-links")
        click.echo(f"{client.server}{link['path']}")
