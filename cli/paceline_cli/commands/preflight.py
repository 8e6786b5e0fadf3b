"""`paceline preflight`: checks of the nodes before a large run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import click
import msgspec

from paceline_agent.errors import OutputError
from paceline_agent.expose import standard_output
from paceline_cli.client import Client
from paceline_cli.options import Seconds
from paceline_cli.preflight import benchmark, nccl_tests, report, speeds, survey
from paceline_cli.preflight.checks import all_checks
from paceline_cli.preflight.collect import collect
from paceline_cli.preflight.launch import SSH, AllNodes, EachNode, Reach, RemoteCommands
from paceline_cli.preflight.plan import Result
from paceline_cli.preflight.verdict import Check, skipped

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.option("--nodes", metavar="A,B,...", help="Nodes to check.  [default: this one]")
@click.option("--server", metavar="URL", help="Check the live nodes of this server.")
@click.option("--token", envvar="PACELINE_TOKEN", help="Bearer token.  [env: PACELINE_TOKEN]")
@click.option(
    "--exec",
    "template",
    metavar="COMMAND",
    help=f"Command that runs another command on a node.  [default: '{SSH}']",
)
@click.option(
    "--launcher",
    metavar="COMMAND",
    help="Command that runs another command on all nodes, such as 'srun -N 16'.",
)
@click.option(
    "--python", default=sys.executable, help="Python on the nodes.  [default: path of this one]"
)
@click.option(
    "--env",
    "environment",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable of the job; may be repeated.",
)
@click.option("--checkpoint", multiple=True, metavar="DIR", help="Checkpoint directory of the job.")
@click.option("--benchmarks/--no-benchmarks", default=True, help="Measure compute and links.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default="auto",
    help="Backend of the measurements.",
)
@click.option(
    "--rounds",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Rounds in which pairs of nodes are measured.",
)
@click.option("--port", type=click.IntRange(1, 65535), help="Rendezvous port on the first node.")
@click.option(
    "--patience",
    default=15.0,
    show_default=True,
    type=Seconds(1, 86_400),
    help="Seconds that a measurement may wait for other nodes.",
)
@click.option(
    "--nccl-tests", "outputs", multiple=True, type=_FILE, help="Output of nccl-tests to check."
)
@click.option(
    "--facts-file",
    "files",
    multiple=True,
    type=_FILE,
    help="Check facts that were collected earlier.",
)
@click.option(
    "--facts", "facts_only", is_flag=True, help="Print the facts of this node as JSON and exit."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/preflight.md).")
@click.pass_context
def preflight(
    context: click.Context,
    nodes: str | None,
    server: str | None,
    token: str | None,
    template: str | None,
    launcher: str | None,
    python: str,
    environment: tuple[str, ...],
    checkpoint: tuple[str, ...],
    benchmarks: bool,
    backend: str,
    rounds: int,
    port: int | None,
    patience: float,
    outputs: tuple[Path, ...],
    files: tuple[Path, ...],
    facts_only: bool,
    as_json: bool,
) -> None:
    """Check nodes before a large run: equal, healthy, connected, and equally fast.

    Exit status 0 if no check failed, 1 otherwise. Nodes are reached by ssh, by any command with
    {node} in it (--exec 'kubectl exec {node} --'), or by one launcher for all of them.
    """
    if facts_only:
        facts = collect([Path(each) for each in checkpoint])
        _print(msgspec.json.encode(facts).decode())
        return
    if server is not None:
        if nodes is not None or launcher is not None:
            raise click.UsageError("--server knows the nodes: no --nodes or --launcher")
        nodes = ",".join(_nodes_of(server, token))
    reach = _reach(nodes, template, launcher)
    prefix = survey.forwarded(os.environ, dict(_pair(each) for each in environment))
    commands = RemoteCommands()
    start = [*prefix, python]
    try:
        if files:
            found = survey.from_files(files)
        else:
            _tell(f"gathering facts: {nodes or launcher or 'this node'}")
            found = survey.ask(reach, [*start, *_facts(checkpoint)], commands, 2 * patience + 60)
        measured: list[Result] = []
        checks = [*found.checks(), *(all_checks(found.nodes) if found.nodes else ())]
        if benchmarks and not files and found.nodes:
            asked = benchmark.BenchmarkRequest(
                None if backend == "auto" else "nccl" if backend == "nccl" else "gloo",
                port,
                rounds,
                patience,
            )
            judged, measured = _measure(found, asked, reach, start, commands)
            checks += judged
    except OSError as error:
        raise click.ClickException(str(error)) from error
    checks += nccl_tests.checks(
        {str(file): nccl_tests.parse(file.read_text(errors="replace")) for file in outputs}
    )
    if as_json:
        _print(json.dumps(report.as_json(checks, found.nodes, measured), indent=2))
    else:
        _print(report.as_text(checks, len(found.nodes)))
    context.exit(1 if report.verdict(checks) == "fail" else 0)


def _reach(nodes: str | None, template: str | None, launcher: str | None) -> Reach:
    if launcher is not None:
        if nodes is not None or template is not None:
            raise click.UsageError("--launcher knows its nodes itself: no --nodes or --exec")
        _check_command("--launcher", launcher)
        return AllNodes(launcher)
    names = tuple(dict.fromkeys(each.strip() for each in (nodes or "").split(",") if each.strip()))
    if not names:
        if nodes is not None or template is not None:
            raise click.UsageError("--nodes takes names: --nodes node-1,node-2")
        return EachNode((os.uname().nodename,), "")
    if template is not None and "{node}" not in template:
        raise click.UsageError("--exec needs {node} where the node's name goes")
    if template is not None:
        _check_command("--exec", template)
    if options := [name for name in names if name.startswith("-")]:
        raise click.UsageError(f"a node's name does not begin with '-': {', '.join(options)}")
    return EachNode(names, template or SSH, quoted=template is None)


def _check_command(option: str, command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}: {command}") from error
    if not words:
        raise click.UsageError(f"{option} takes a command: {option} 'srun -N 16'")


def _nodes_of(server: str, token: str | None) -> list[str]:
    """Return the host names of live nodes, sorted; a lost node is only reported."""
    with Client(server, token) as client:
        found = client.items("/nodes")
    lost = [f"{each['id']} ({each['hostname']})" for each in found if each["state"] == "lost"]
    if lost:
        _tell(f"the server has lost contact with {', '.join(lost)}: not checked")
    names = sorted({each["hostname"] for each in found if each["state"] != "lost"})
    if not names:
        raise click.ClickException(
            f"{server} knows no live node: start `paceline agent` on the nodes"
        )
    return names


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint="--env")
    return name, value


def _facts(checkpoints: tuple[str, ...]) -> list[str]:
    paths = [word for each in checkpoints for word in ("--checkpoint", each)]
    return ["-P", "-m", "paceline_cli", "preflight", "--facts", *paths]


def _measure(
    found: survey.Survey,
    asked: benchmark.BenchmarkRequest,
    reach: Reach,
    start: list[str],
    commands: RemoteCommands,
) -> tuple[list[Check], list[Result]]:
    reason = benchmark.why_not(found.nodes)
    if reason is not None:
        return [skipped("micro-benchmarks", reason)], []
    _tell("measuring compute and links")
    plan, measured = benchmark.run_where_they_meet(found.nodes, asked, reach, start, commands)
    return list(speeds.checks(measured, found.nodes, plan.backend)), measured


def _print(text: str) -> None:
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        standard_output.write((text if is_terminal else click.unstyle(text)) + "\n")
    except OutputError as error:
        raise click.ClickException(str(error)) from error


def _tell(progress: str) -> None:
    click.echo(progress, err=True)
