"""The command `paceline`: a thin client of the server's API, and launcher of its programs.

Subcommands are imported on use, so `paceline jobs` needs neither the
server's nor the agent's extra.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from paceline_cli.extras import load

# name -> (module, attribute, extra it needs, one line of help)
COMMANDS = {
    "server": (
        "paceline_server.__main__",
        "server",
        "server",
        "Run the server or manage its tokens.",
    ),
    "agent": ("paceline_agent.__main__", "main", "agent", "Run the agent of this node."),
    "run": ("paceline_cli.commands.run", "run", None, "Start a training job on the agents."),
    "watch": (
        "paceline_cli.commands.watch",
        "watch",
        None,
        "Run a training and record it; no line of it changes.",
    ),
    "demo": (
        "paceline_demo.command",
        "demo",
        None,
        "Run a demo job on this machine and inject faults.",
    ),
    "login": (
        "paceline_cli.commands.login",
        "login",
        None,
        "Print a link that signs in a browser.",
    ),
    "jobs": ("paceline_cli.commands.jobs", "jobs", None, "List, show and stop jobs."),
    "nodes": (
        "paceline_cli.commands.nodes",
        "nodes",
        None,
        "List nodes and release quarantined ones.",
    ),
    "incidents": (
        "paceline_cli.commands.incidents",
        "incidents",
        None,
        "Show incidents, their causes and evidence.",
    ),
    "actions": (
        "paceline_cli.commands.actions",
        "actions",
        None,
        "List, approve and reject repairs.",
    ),
    "policy": (
        "paceline_cli.commands.policy",
        "policy",
        None,
        "Show, change and check policies.",
    ),
    "analyze": (
        "paceline_cli.commands.analyze",
        "analyze",
        "server",
        "Find what slowed a recorded run, and its cost.",
    ),
    "preflight": (
        "paceline_cli.commands.preflight",
        "preflight",
        None,
        "Check nodes before a large run.",
    ),
    "evaluate": (
        "paceline_evaluation.command",
        "evaluate",
        "server",
        "Measure the accuracy of the diagnosis.",
    ),
}


_OF_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}


class LazyCommands(click.Group):
    """A group whose members are imported on first use."""

    def main(self, *args: Any, **options: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):  # the locale may lack letters of a job's name
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.filename is not None or error.errno not in _OF_OUTPUT:
                raise
            click.echo(f"Error: not everything could be printed: {error.strerror}", err=True)
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), 1
            )  # so that flushing the buffer at exit does not fail again
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, extra, _ = COMMANDS[name]
        command = getattr(load(module, name, extra), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (*_, line) in COMMANDS.items()])


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with `paceline demo`, or with your own training: `paceline watch -- torchrun "
    "train.py`. Then: `paceline server` on one machine, `paceline agent "
    "--server URL` on every node, and `paceline run -- python train.py` to train. Exit "
    "status: 0 on success, 1 on failure, 2 for invalid usage.",
)
@click.version_option(package_name="paceline", prog_name="paceline")
def main() -> None:
    """Watch a distributed training run, name what slows or stops it, and repair it."""
    if os.environ.get("NO_COLOR"):
        click.get_current_context().color = False


def run_main(arguments: Sequence[str] | None = None, **options: Any) -> None:
    main.main(args=arguments, prog_name="paceline", **options)


if __name__ == "__main__":
    run_main()
