"""The server's commands, also reached as `paceline server`.

python -m paceline_server server [--port N]
python -m paceline_server server token create --name NAME --scope SCOPE
python -m paceline_server server node-key release AGENT_ID
python -m paceline_server server migrate
python -m paceline_server openapi
python -m paceline_server policy
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn, get_args

import click
from pydantic import ValidationError
from sqlalchemy.engine import make_url

from paceline_server.decide.types import AuditEntry
from paceline_server.detect.kinds import SEVERITIES
from paceline_server.policy import Mode, policy_table
from paceline_server.settings import Role, Settings
from paceline_server.store import audit
from paceline_server.store.database import Database, UnusableError
from paceline_server.store.node_keys import release_node_key
from paceline_server.store.tokens import SCOPES, create_token, revoke_token

if find_spec("fastapi") is None:  # imported only by the commands that need it; named at once
    raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

_severity = click.Choice(SEVERITIES)
_database_option = partial(
    click.option,
    "--database-url",
    metavar="URL",
    help="sqlite:///PATH or postgresql://USER@HOST/NAME.  [default: sqlite:///paceline.db]",
)


def _use_database(context: click.Context, _: click.Parameter, url: str | None) -> None:
    if url is not None:
        context.obj = _settings({"database_url": url})


# May stand before the subcommand or after it.
_other_database = _database_option(expose_value=False, callback=_use_database)


@click.group()
def main() -> None:
    """Commands of the Paceline server."""


_ROLES = (
    "api: API, dashboard and ingest; worker: diagnosis and repair of jobs; all: both, in two"
    " processes. api and worker may run on several machines with one PostgreSQL.  [default: all]"
)


@main.group(invoke_without_command=True)
@_database_option()
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0: any free port.  [default: 8470]")
@click.option(
    "--fd", type=int, metavar="N", help="Listen on this inherited socket instead of a new one."
)
@click.option("--tls-cert", metavar="FILE", help="Certificate (chain) to serve HTTPS with.")
@click.option("--tls-key", metavar="FILE", help="Private key, if the certificate file has none.")
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    help="CA certificates; each client must have a certificate signed by one of them.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    envvar="PACELINE_SERVER_ALLOWED_HOST",
    multiple=True,
    metavar="NAME",
    help="Additional host name of this server; '*': any.",
)
@click.option(
    "--public-metrics",
    is_flag=True,
    default=None,
    help="Serve /metrics without a token, also beyond loopback.",
)
@click.option("--role", type=click.Choice(get_args(Role)), help=_ROLES)
@click.option(
    "--policy",
    metavar="FILE",
    help="TOML file with the default policy of new jobs (docs/policy.md).",
)
@click.option(
    "--launcher-mode",
    type=click.Choice(get_args(Mode)),
    help="Policy mode of jobs of Slurm, Kubernetes and torchrun.  [default: approve]",
)
@click.option(
    "--kubernetes-url", metavar="URL", help="Kubernetes' API, if the server is outside the cluster."
)
@click.option(
    "--kubernetes-credentials",
    metavar="DIRECTORY",
    help="Directory with token and ca.crt of a service account, likewise.",
)
@click.option("--webhook-url", metavar="URL", help="Send incidents to this webhook.")
@click.option("--action-webhook-url", metavar="URL", help="Send actions to this webhook.")
@click.option(
    "--chat-webhook-url",
    metavar="URL",
    help="Send alerts to this channel of Slack, Mattermost or Google Chat.",
)
@click.option(
    "--alertmanager-url", metavar="URL", help="Send incidents to this Alertmanager (base URL)."
)
@click.option(
    "--webhook-severity", type=_severity, help="Least severe incidents sent to the webhook."
)
@click.option(
    "--chat-severity", type=_severity, help="Least severe incidents sent to the chat channel."
)
@click.option(
    "--alertmanager-severity", type=_severity, help="Least severe incidents sent to Alertmanager."
)
@click.option(
    "--allow-local-receivers",
    is_flag=True,
    default=None,
    help="Allow receivers of alerts at loopback and link-local addresses.",
)
@click.option("--external-url", metavar="URL", help="URL of this server for links in alerts.")
@click.pass_context
def server(context: click.Context, /, **options: Any) -> None:
    """Run the server: receive metrics, diagnose jobs, serve the API and the dashboard.

    Every option can also be set as an environment variable, PACELINE_SERVER_<NAME>. So can settings
    without an option. The command line takes precedence.
    """
    context.obj = _settings(options)
    if context.invoked_subcommand is None:
        from paceline_server.app import StartError, serve  # noqa: PLC0415 (seconds of imports)

        try:
            serve(context.obj)
        except (StartError, UnusableError) as error:
            _fail(str(error))


def _settings(options: dict[str, Any]) -> Settings:
    given = {name: value for name, value in options.items() if value not in (None, ())}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{_name(str(field), given)}: " for field in first["loc"][:1])
        _fail(f"{where}{first['msg']}.".replace("Value error, ", ""))
    except OSError as error:  # no home directory
        _fail(f"{error}.")


def _name(field: str, given: dict[str, Any]) -> str:
    """Return where the user has set this field: the option, else the environment variable."""
    if field in given:
        return next(option.opts[0] for option in server.params if option.name == field)
    return f"{Settings.model_config['env_prefix']}{field.upper()}"


def _fail(sentence: str) -> NoReturn:
    click.echo(f"paceline server: {sentence}", err=True)
    sys.exit(2)


@server.command()
@_other_database
@click.pass_obj
def migrate(settings: Settings) -> None:
    """Upgrade the database schema to this version. The server also does this at startup."""
    with _open(settings):
        click.echo("The database schema is up to date.")


@server.group()
def token() -> None:
    """Create and revoke API tokens."""


@token.command()
@click.option("--name", required=True, help="Name of the token, shown in the audit log.")
@click.option(
    "--scope",
    required=True,
    type=click.Choice(SCOPES),
    help="agent: send metrics; viewer: read; operator: read, run jobs, approve actions.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="With --scope agent: how many nodes it may enroll; 0: any number.",
)
@_other_database
@click.pass_obj
def create(settings: Settings, name: str, scope: Any, nodes: int) -> None:
    """Create a token and print it. It cannot be shown again: only its hash is stored."""
    with _open(settings) as database:
        try:
            with database.write() as session:
                secret = create_token(session, name, scope, time.time_ns(), nodes or None)
        except ValueError as error:
            _fail(f"{error}.")
    click.echo(secret)


@token.command()
@click.option("--name", required=True)
@_other_database
@click.pass_obj
def revoke(settings: Settings, name: str) -> None:
    """Revoke a token; it takes effect within a second.

    Tokens are required even after the last one is revoked.
    """
    with _open(settings) as database, database.write() as session:
        if not revoke_token(session, name, time.time_ns()):
            _fail(f"there is no valid token named {name!r}.")
    click.echo(f"Token {name} revoked.")


@server.group("node-key")
def node_key() -> None:
    """Manage the keys with which agents prove which node they are."""


@node_key.command()
@click.argument("agent_id")
@_other_database
@click.pass_obj
def release(settings: Settings, agent_id: str) -> None:
    """Forget the key of an agent, so that the next node with this id binds it to its own key.

    Use it after a node was reinstalled or replaced under the same name and its agent is rejected.
    """
    with _open(settings) as database, database.write() as session:
        if not release_node_key(session, agent_id):
            _fail(f"no key is known of an agent {agent_id!r}.")
        entry = AuditEntry(actor="command line", verb="released the key", subject=agent_id)
        audit.record(session, None, entry, time.time_ns())
    click.echo(f"The next node that reports as {agent_id} binds that name to its key.")


class _open:  # noqa: N801 (reads as a verb)
    """Context manager that yields the migrated database."""

    def __init__(self, settings: Settings) -> None:
        path = make_url(settings.database_url).database or ""
        is_new = settings.database_url.startswith("sqlite:") and not os.path.exists(path)
        self._created = os.path.abspath(path) if is_new else None
        self._database = Database(
            settings.database_url, timeout_seconds=settings.database_timeout_seconds
        )

    def __enter__(self) -> Database:
        try:
            self._database.migrate()
        except UnusableError as error:
            _fail(str(error))
        if self._created is not None:  # by default in the current directory, not in the server's
            click.echo(
                f"paceline server: created the database {self._created}. For that of another"
                " server: paceline server --database-url URL ...",
                err=True,
            )
        return self._database

    def __exit__(self, *_: object) -> None:
        self._database.close()


@main.command()
def policy() -> None:
    """Print the table of policy fields."""
    click.echo(policy_table())


@main.command()
def openapi() -> None:
    """Print the OpenAPI document of the API."""
    from paceline_server.api import router  # noqa: PLC0415 (seconds of imports)

    document = router.build(None).openapi()
    click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))


if __name__ == "__main__":
    main(prog_name="python -m paceline_server")
