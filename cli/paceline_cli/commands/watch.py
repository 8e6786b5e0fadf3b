"""`paceline watch`: run a training that nobody changed, and record it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import httpx
from click.core import ParameterSource

from paceline_cli import companions, render, watched
from paceline_cli.client import without_proxy
from paceline_cli.commands import incidents, jobs
from paceline_cli.options import json_option, server_options
from paceline_cli.watch_directory import DATABASE, RECORDED, RESULT, watch_directory
from paceline_wire.address import SERVER_PORT, is_http_address
from paceline_wire.local_token import (
    STATE_DIRECTORY,
    TokenFileError,
    find_token,
)
from paceline_wire.node_directory import (
    MEMORY,
    PREFIX,
    RINGS,
    is_in_use,
    rings_of_running_agents,
)

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
RING_DIRECTORY = "PACELINE_RING_DIRECTORY"
NODE_DIRECTORY = "PACELINE_AGENT_NODE_DIRECTORY"
# With it torchrun gives each start of the ranks a store of its own, if its rendezvous can.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# Variables with the number of a task, of which several may run on one node.
TASK_NUMBERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


class NotRecordedError(Exception):
    """The command runs, but is not recorded; the message says why and what to do."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@server_options
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def watch(
    ctx: click.Context, server: str, token: str | None, as_json: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND and record the training in it; no line of it changes.

    \b
    paceline watch -- torchrun --nproc-per-node 8 train.py
    srun paceline watch --server https://HOST:8470 -- python train.py
    paceline watch                what was found in the last training with a local server

    Sets PACELINE=1 and becomes COMMAND: signals, output and exit status are its own. For a torchrun
    with --max-restarts it also sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which ranks that
    are started again may look for dead ones. If no agent runs on this node, one is started for as
    long as COMMAND and others like it run; without --server, and without a server on this machine,
    a server too. Its dashboard shows the job. torchrun, or a script that imports torch, then ends
    with the problems that were found, and `paceline watch` alone shows the result.
    """
    if not command:
        for name in ("server", "token"):
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name} needs a COMMAND.")
        _show_result(as_json)
        return
    if as_json:
        raise click.UsageError("--json is for `paceline watch` without a command.")
    if command[0].startswith("-"):
        raise click.NoSuchOption(command[0])
    program = shutil.which(command[0])
    if program is None:
        raise click.ClickException(f"there is no program {command[0]!r}")
    chosen = ctx.get_parameter_source("server") is not ParameterSource.DEFAULT
    environment = {**os.environ, "PACELINE": "1"}
    try:
        _say(_prepare(environment, server, token, chosen))
    except (NotRecordedError, OSError) as error:
        _say(f"not recorded: {error}")
    if os.environ.get(AUTOLOAD, "1") != "1":
        _say(f"not recorded: PyTorch loads no plug-ins while {AUTOLOAD} is set; unset it")
    if _has_restarts(command, environment) and OWN_STORE not in environment:
        environment[OWN_STORE] = "1"
        _say(f"{OWN_STORE}=1, so that ranks that torchrun starts again do not look for dead ones")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and else by COMMAND as well
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise click.ClickException(f"{program} cannot be run: {error.strerror}") from error


def _show_result(as_json: bool) -> None:
    """Print what was found in the newest training that a local server recorded."""
    try:
        logs = watch_directory(os.environ)
    except OSError as error:
        raise click.ClickException(str(error)) from error
    result = watched.read(logs)
    if as_json:
        render.show_json(result)
        return
    if not result["jobs"]:
        click.echo("No training was recorded on this node with a server of `paceline watch`.")
        render.show_next({"paceline watch -- torchrun train.py": "record one"})
        return
    try:
        _show_jobs(result)
    except (KeyError, TypeError, ValueError) as error:
        raise click.ClickException(
            f"{logs / RESULT} cannot be shown, it is of another release of Paceline: {error!r}"
        ) from error
    newest = result["jobs"][0]
    if newest["state"] not in jobs.ENDED and _responds(result["server"]):
        render.show_next({result["server"]: "dashboard"})
    else:
        command = f"paceline server --database-url {_database(logs)}"
        render.show_next({command: "the dashboard of all that were recorded"})


def _show_jobs(result: dict[str, Any]) -> None:
    """Print the newest job, and a table of the others."""
    newest, *others = result["jobs"]
    if newest["state"] not in jobs.ENDED:
        click.echo(f"As of {render.clock(result['updated_at'])}:")
    jobs.show_job(newest)
    incidents.show_incidents(newest["incidents"], "No problem was found.")
    if others:
        jobs.show_jobs(others)


def _database(logs: Path) -> str:
    return f"sqlite:///{logs / DATABASE}"


def _has_restarts(command: tuple[str, ...], environment: dict[str, str]) -> bool:
    """Return whether torchrun may start ranks again. A script's own option does no harm."""
    options = (each.partition("=")[0].replace("_", "-") for each in command)
    return "PET_MAX_RESTARTS" in environment or "--max-restarts" in options


def _say(text: str) -> None:
    click.echo(f"paceline: {text}", err=True)


def _prepare(environment: dict[str, str], server: str, token: str | None, chosen: bool) -> str:
    """Start what is missing; return the line that says where the job is shown.

    Raises:
        NotRecordedError: no agent runs here, and none can be started.
    """
    given = environment.get(RING_DIRECTORY)
    if given is not None:
        if not given:
            raise NotRecordedError(f"{RING_DIRECTORY} is empty, which turns the hooks off")
        return f"recorded by the agent with the rings {given}"
    try:
        logs = watch_directory(os.environ)
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if found := _found(environment, server, chosen):
            return found[0]
        if error.filename is None:  # no home directory
            raise NotRecordedError(str(error)) from error
        raise NotRecordedError(
            f"{error.filename}: {error.strerror}; name another directory with {STATE_DIRECTORY}"
        ) from error
    with companions.locked(logs):  # srun starts several tasks of one node at the same time
        companions.register(logs, os.getpid())
        line, dashboard = _found(environment, server, chosen) or _start(
            environment, server, token, chosen, logs
        )
        result = str(logs / RESULT) if _keeps_result(logs, environment) else dashboard
        if result and not any(environment.get(name, "0") != "0" for name in TASK_NUMBERS):
            environment[watched.VARIABLE] = result
        return line


def _keeps_result(logs: Path, environment: dict[str, str]) -> bool:
    """Return whether the agent that records was started with a server, which keeps the result."""
    with suppress(OSError):
        recorded = (logs / RECORDED).read_text(encoding="utf-8")
        return recorded in map(str, _running_agents(environment))
    return False


def _found(environment: dict[str, str], server: str, chosen: bool) -> tuple[str, str | None] | None:
    """Return the line that says where the job is shown, and the address of the dashboard if it is
    known; None: no agent runs on this node."""
    found = _running_agents(environment)
    if not found:
        return None
    if len(found) > 1:
        raise NotRecordedError(_which(found))
    if NODE_DIRECTORY in environment:
        environment[RING_DIRECTORY] = str(found[0])
    dashboard = server if chosen or _responds(server) else None
    where = f"; dashboard: {dashboard}" if dashboard else ""
    return f"recorded by the agent of this node, {found[0].parent.name}{where}", dashboard


def _which(rings: list[Path]) -> str:
    choices = " or ".join(f"{RING_DIRECTORY}={each}" for each in rings)
    return f"{len(rings)} agents run on this node; choose one of them with {choices}"


def _running_agents(environment: dict[str, str]) -> list[Path]:
    """Return the directories of rings that agents of this node read."""
    if (given := environment.get(NODE_DIRECTORY)) is None:
        return rings_of_running_agents()
    return [Path(given) / RINGS] if is_in_use(Path(given)) else []


def _start(
    environment: dict[str, str], server: str, token: str | None, chosen: bool, logs: Path
) -> tuple[str, str]:
    """Start an agent, and a server unless there is one; return as `_found`."""
    needs_server = not chosen and not _accepts(server, token, environment)
    missing = [
        extra
        for extra, module in (("agent", "tenacity"), ("server", "fastapi"))
        if (extra == "agent" or needs_server) and find_spec(module) is None
    ]
    if missing:
        raise NotRecordedError(
            f"no agent runs on this node; start one, or pip install 'paceline[{','.join(missing)}]'"
        )
    if not is_http_address(server):
        raise NotRecordedError(f"--server: expected http://HOST:PORT, got {server!r}")
    directory = Path(environment.get(NODE_DIRECTORY) or MEMORY / f"{PREFIX}watch-{os.geteuid()}")
    run = [sys.executable, "-P", "-m", "paceline_cli"]
    server_command: list[str] = []
    listener = companions.listen(SERVER_PORT) if needs_server else None
    descriptor = 0 if listener is None else listener.fileno()
    if listener is not None:
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = ("--fd", str(descriptor), "--database-url", _database(logs))
        server_command = [*run, "server", *options]
    agent_command = [
        *(*run, "agent", "--server", server, "--node-directory", str(directory)),
        *("--spool-directory", str(logs / "spool"), "--slots", "0", "--no-metrics"),
    ]
    own = {name: value for name, value in environment.items() if name != "PACELINE"}
    if token:
        own["PACELINE_AGENT_TOKEN"] = token
    places = [str(directory), str(logs), server, str(descriptor)]
    arguments = [*places, *agent_command, "--", *server_command]
    pipe = companions.launch(arguments, own, descriptor)
    if listener is not None:
        listener.close()
    with open(pipe, encoding="utf-8", errors="replace") as report:
        answer = report.readline().strip()
    if answer != companions.READY:
        raise NotRecordedError(answer or f"the agent did not start; see {logs}")
    environment[RING_DIRECTORY] = str(directory / RINGS)
    recorded = environment[RING_DIRECTORY] if needs_server else ""
    (logs / RECORDED).write_text(recorded, encoding="utf-8")
    started = "a server and an agent run" if needs_server else "an agent runs"
    afterwards = "; its result: paceline watch" if needs_server else ""
    return f"dashboard: {server} ({started} until the training ends{afterwards})", server


def _accepts(server: str, token: str | None, environment: dict[str, str]) -> bool:
    """Return whether a server at this address accepts this user's agents: it may be another user's.

    Raises NotRecordedError if the user's token must not be used.
    """
    try:
        token = (
            token
            or environment.get("PACELINE_AGENT_TOKEN")
            or find_token(server, "agent", environment)
        )
    except TokenFileError as error:
        raise NotRecordedError(str(error)) from error
    answer = None if token is None else _get(server, "/api/v1/caller", token)
    # 403: the token is known, and only grants other requests.
    return answer is not None and answer.status_code in (200, 403)


def _responds(server: str) -> bool:
    """Return whether a Paceline server responds at this address."""
    answer = _get(server, "/healthz")
    return answer is not None and answer.status_code == 200 and answer.text.strip() == "ok"


def _get(server: str, path: str, token: str | None = None) -> httpx.Response | None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(timeout=2.0, headers=headers, mounts=without_proxy(server)) as client:
            return client.get(f"{server.rstrip('/')}{path}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
