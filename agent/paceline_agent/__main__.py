"""`python -m paceline_agent`, and the command behind `paceline agent`."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import click

from paceline_agent.app import run
from paceline_agent.errors import OutputError, SettingsError
from paceline_agent.expose.check import run as check_node
from paceline_agent.expose.once import run as sweep_once
from paceline_agent.settings import (
    CHECKPOINT_SECONDS,
    FLUSH_SECONDS,
    HOSTNAME_LABEL,
    HOSTNAME_LABELS,
    LEASE_SECONDS,
    METRICS_HOST,
    METRICS_PORT,
    ORPHAN_GRACE_SECONDS,
    SPOOL_BYTES,
    AgentSettings,
)
from paceline_agent.supervise.guard import open_pidfd
from paceline_wire.address import DEFAULT_SERVER_URL

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, dir_okay=False)


def _read_file(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Read settings from a file; they override defaults; flags and environment override them."""
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{path} cannot be read: {error}") from error
        names = _names(context.command)
        if unknown := [name for name in values if name.replace("-", "_") not in names]:
            raise click.BadParameter(f"{path} contains unknown options: {', '.join(unknown)}")
        context.default_map = {
            (param := names[name.replace("-", "_")]).name: _given(path, name, value, param)
            for name, value in values.items()
        }
    return path


def _given(path: Path, name: str, value: Any, param: click.Parameter) -> Any:
    """Return a value of the file as click takes it: a list for an option that may be repeated."""
    items = value if param.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise click.BadParameter(f"{path}: {name}: expected text or a number, got {value!r}")
    return items if param.multiple else value


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """Return parameters by the names allowed in a file, such as `server` or `server_url`."""
    names = {param.name: param for param in command.params if param.name}
    for param in command.params:
        for option in param.opts:
            names.setdefault(option.lstrip("-").replace("-", "_"), param)
    return names


@click.command(
    "agent",
    context_settings={"auto_envvar_prefix": "PACELINE_AGENT", "show_default": True},
    epilog="Every option can also be given as PACELINE_AGENT_OPTION in the environment, or as "
    'a line such as server_url = "http://server:8470" in --config.',
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=_read_file,
    help="A TOML file with any of these options.",
)
@click.option(
    "--server",
    "server_url",
    envvar=["PACELINE_AGENT_SERVER_URL", "PACELINE_AGENT_SERVER", "PACELINE_SERVER"],
    default=DEFAULT_SERVER_URL,
    help="URL of the server.",
)
@click.option("--agent-id", help="This node's name, unique among agents. [default: hostname]")
@click.option(
    "--token",
    envvar=["PACELINE_AGENT_TOKEN", "PACELINE_TOKEN"],
    help="Bearer token with scope agent; better given as PACELINE_AGENT_TOKEN.",
)
@click.option(
    "--tls-ca", type=_FILE, help="CA certificates that verify the server's. [default: system]"
)
@click.option("--tls-cert", type=_FILE, help="Client certificate, if the server requires one.")
@click.option("--tls-key", type=_FILE, help="Private key, if the certificate file has none.")
@click.option(
    "--allow-plain-http",
    is_flag=True,
    help="Connect to a server on another machine without TLS: tokens can be read on the network.",
)
@click.option(
    "--node-directory",
    type=_DIRECTORY,
    help="Directory for rings and logs of this node. [default: /dev/shm/paceline-AGENT_ID]",
)
@click.option(
    "--spool-directory",
    type=_DIRECTORY,
    help="Directory for batches that are not sent yet; best on disk.",
)
@click.option(
    "--slots", type=int, help="Number of ranks this node can run. [default: its GPUs, else 1]"
)
@click.option(
    "--run-as",
    metavar="USER",
    help="User that ranks run as, by name or number; root only if it is named here. [default: "
    "paceline-job if it exists, else nobody, if the agent is root; else the agent's own user]",
)
@click.option("--address", help="Address at which other nodes reach rank 0. [default: hostname]")
@click.option(
    "--once",
    is_flag=True,
    help="Collect once, print the metrics and exit; needs no server and starts no ranks. Exit "
    "status 0 if at least one collector returned something. With --sysfs, --procfs or --kmsg it "
    "reads a copy of any node's tree or log.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Show what this agent can and cannot see on this node, and how to enable the rest. Exit "
    "status 1 if something is missing that the agent cannot work without.",
)
@click.option("--json", "as_json", is_flag=True, help="With --once or --check: print JSON.")
@click.option("--openmetrics", is_flag=True, help="With --once: print OpenMetrics.")
@click.option(
    "--sysfs",
    "--sysfs-root",
    "sysfs_root",
    type=_DIRECTORY,
    default=Path("/sys"),
    help="With --once also a copy of /sys/class, or of one of its directories.",
)
@click.option(
    "--procfs",
    "--procfs-root",
    "procfs_root",
    type=_DIRECTORY,
    default=Path("/proc"),
    help="Path of /proc, or of a copy of it.",
)
@click.option(
    "--kmsg",
    "--kmsg-path",
    "kmsg_path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("/dev/kmsg"),
    help="The kernel log, or a file in the same format.",
)
@click.option(
    "--exclude-rdma",
    "excluded_rdma",
    envvar="PACELINE_AGENT_EXCLUDE_RDMA",
    multiple=True,
    metavar="NAME",
    help="RDMA device or port that is never opened: mlx5_1, mlx5_1/1, mlx5_bond_*.",
)
@click.option(
    "--nccl-inspector-directory",
    type=_DIRECTORY,
    help="Output directory of the NCCL Inspector, besides those in the ranks' environments.",
)
@click.option(
    "--flush-seconds", type=float, default=FLUSH_SECONDS, help="Interval between batches."
)
@click.option("--spool-bytes", type=int, default=SPOOL_BYTES, help="Maximum size of the spool.")
@click.option("--metrics-host", default=METRICS_HOST, help="Address that /metrics listens on.")
@click.option(
    "--metrics-port", type=int, default=METRICS_PORT, help="Port of /metrics; 0: any free port."
)
@click.option("--metrics/--no-metrics", default=True, help="Serve /metrics.")
@click.option(
    "--hostname-label",
    type=click.Choice(HOSTNAME_LABELS),
    default=HOSTNAME_LABEL,
    help="Name of the host label on /metrics; newer dcgm-exporters write hostname.",
)
@click.option(
    "--lease-seconds",
    type=float,
    default=LEASE_SECONDS,
    help="Without contact to the server, kill ranks that finished no operation for this time; "
    "0: never.",
)
@click.option(
    "--orphan-grace-seconds",
    type=float,
    default=ORPHAN_GRACE_SECONDS,
    help="How long ranks of a killed agent wait for the next agent to adopt them.",
)
@click.option(
    "--checkpoint-seconds",
    type=float,
    default=CHECKPOINT_SECONDS,
    help="On SIGTERM, how long ranks that save a checkpoint on command may take before they are "
    "stopped; a second SIGTERM ends the wait; 0: do not ask.",
)
@click.option(
    "--label",
    "labels",
    envvar="PACELINE_AGENT_LABEL",
    multiple=True,
    metavar="NAME=VALUE",
    help="Label of this node in the server.",
)
@click.option(
    "--exit-with-parent",
    is_flag=False,
    flag_value=0,
    type=int,
    metavar="[PID]",
    help="Stop when the parent process ends (which must be PID, if given).",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning"]),
    default="info",
    help="Least severe level that is logged.",
)
def main(
    metrics: bool,
    labels: tuple[str, ...],
    exit_with_parent: int | None,
    log_level: str,
    once: bool,
    check: bool,
    as_json: bool,
    openmetrics: bool,
    **options: Any,
) -> None:
    """Watch this node and run the ranks that the server places on it.

    Needs only the server's URL. On SIGTERM its ranks save a checkpoint if they can. Then the agent
    stops them, and sends the remaining data for at most five seconds.
    """
    if once and check:
        raise click.UsageError("--once and --check cannot be combined")
    if (as_json and not (once or check)) or (openmetrics and not once):
        raise click.UsageError("--json needs --once or --check, --openmetrics needs --once")
    logging.basicConfig(
        level="WARNING" if once or check else log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if exit_with_parent is not None:
        _exit_with(exit_with_parent)
    try:
        settings = _settings(metrics, labels, options)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    try:
        if once:
            sys.exit(sweep_once(settings, as_json=as_json, as_openmetrics=openmetrics))
        if check:
            sys.exit(check_node(settings, json=as_json))
    except OutputError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(run(settings))


def _settings(metrics: bool, labels: tuple[str, ...], options: dict[str, Any]) -> AgentSettings:
    """Build the settings; options that were not given keep the defaults of AgentSettings."""
    given = {name: value for name, value in options.items() if value is not None}
    if not metrics:
        given["metrics_port"] = None
    assert given.keys() <= {field.name for field in dataclasses.fields(AgentSettings)}
    return AgentSettings(**given, labels=_parse_labels(labels), environment=dict(os.environ))


def _parse_labels(labels: tuple[str, ...]) -> dict[str, str]:
    for label in labels:
        if "=" not in label:
            raise SettingsError(f"a label must look like NAME=VALUE, got {label!r}")
    return dict(label.split("=", 1) for label in labels)


def _exit_with(parent: int) -> None:
    """Send SIGTERM to this process when its parent ends, or fail if it has ended already.

    A thread waits on a pidfd. The kernel's parent-death signal would be sent when the parent's
    thread ends, which may be earlier than its process.
    """
    current = os.getppid()
    if (parent and current != parent) or (not parent and current == 1):
        raise click.ClickException("the process that started this agent has ended")
    descriptor = open_pidfd(current)

    def watch() -> None:
        if descriptor is not None:
            select.select([descriptor], [], [])
        else:
            while os.getppid() == current:
                time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    main(prog_name="paceline agent")
