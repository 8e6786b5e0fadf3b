"""`paceline demo`: all of Paceline on one machine, with faults injected into real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
from click.core import ParameterSource
from rich.console import Console

from paceline_cli import render
from paceline_cli.client import Client
from paceline_cli.commands.jobs import show_ledger
from paceline_cli.options import OutputFile
from paceline_demo import faults
from paceline_demo.cluster import GPUS_PER_NODE, Cluster
from paceline_demo.report import DemoReport
from paceline_demo.scenario import Scenario
from paceline_demo.training import start_training, stop_jobs
from paceline_wire.address import SERVER_PORT

HEALTHY_SECONDS = 60.0  # duration of a run without faults
AFTER_REPAIR_SECONDS = 6.0  # healthy training after the last repair
PROGRESS_SECONDS = 5.0  # between progress lines, if the output is not a terminal
START_MINUTES = 0.75  # until the first step, on two cores
FAULT_MINUTES = 0.5  # detection, repair and warm-up of one fault


class DemoOutput:
    """Print lines with the seconds since the start.

    On a terminal, a progress line below them is rewritten in place. Elsewhere it is printed every
    PROGRESS_SECONDS.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.started = time.monotonic()
        self._status = self.console.status("") if self.console.is_terminal else None
        self._last = 0.0
        if self._status is not None:
            self._status.start()

    def show(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.started:6.1f} s] {text}", markup=False)

    def progress(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text.replace("[", "\\["))
        elif time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self.show(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def _power_of_two(ctx: click.Context, parameter: click.Parameter, value: int) -> int:
    if value not in (1, 2, 4, 8):
        raise click.BadParameter(
            f"expected 1, 2, 4 or 8 (it divides the attention heads), got {value}"
        )
    return value


@click.command()
@click.option("--dp", default=2, show_default=True, type=click.IntRange(1, 8))
@click.option("--pp", default=2, show_default=True, type=click.IntRange(1, 8))
@click.option("--tp", default=2, show_default=True, callback=_power_of_two)
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe"]), default="1f1b", show_default=True)
@click.option(
    "--faults",
    "fault_list",
    default=faults.DEFAULT,
    show_default=True,
    metavar="LIST",
    help="Comma-separated faults, injected one after another: throttle:NODE, crash:RANK, "
    "hang:RANK, node-loss:NODE, slow-data:RANK, or none. Without a number, --seed selects the "
    "target.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Selects the targets of faults given without a number.",
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "approve", "observe"]),
    default="auto",
    show_default=True,
    help="auto: repair; approve: ask before each repair; observe: only report.",
)
@click.option(
    "--exit",
    "exits",
    is_flag=True,
    help="End after the last fault; status 0 only if all faults were handled.",
)
@click.option(
    "--report", "report_path", type=OutputFile(), help="Write the result to this file as JSON."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=SERVER_PORT,
    show_default=True,
    help="TCP port of the dashboard; another one if it is in use.",
)
@click.option("--exit-with-parent", is_flag=True, hidden=True)
@click.pass_context
def demo(
    ctx: click.Context,
    dp: int,
    pp: int,
    tp: int,
    schedule: str,
    fault_list: str,
    seed: int,
    mode: str,
    exits: bool,
    report_path: Path | None,
    port: int,
    exit_with_parent: bool,
) -> None:
    """Run a real training on this machine, inject faults and repair them.

    Starts a server, one agent per two ranks plus a spare node, and the reference trainer at
    dp x pp x tp. Injects faults one after another and shows how each is detected, explained and
    repaired. Keeps running until Ctrl-C unless --exit is given.
    """
    world_size = dp * pp * tp
    if world_size > 32:
        raise click.BadParameter(f"dp x pp x tp is {world_size} ranks; the demo runs at most 32")
    node_count = -(-world_size // GPUS_PER_NODE) + 1
    requests = faults.parse(fault_list, world_size, node_count - 1)
    if exit_with_parent:
        _end_with_parent()
    report = DemoReport(mode=mode)
    output = DemoOutput()
    with _interruptible():
        cluster = Cluster(node_count, port)
        try:
            for line in _plan(node_count, (dp, pp, tp), requests, exits):
                output.show(line)
            _start(cluster, output)
            with Client(cluster.url) as client:
                scenario = Scenario(
                    client=client,
                    cluster=cluster,
                    mode=mode,
                    approve=exits,
                    chance=random.Random(seed),
                    start_job=lambda: _run_trainer(cluster, (dp, pp, tp), schedule, mode, seed),
                    show=output.show,
                    progress=output.progress,
                    report=report,
                )
                scenario.begin()
                for request in _injectable(ctx, requests, cluster):
                    scenario.play(request)
                scenario.stay_healthy(AFTER_REPAIR_SECONDS if requests else HEALTHY_SECONDS)
                report.seconds = round(time.monotonic() - output.started, 1)
                if not exits:
                    output.show(f"the job keeps running at {scenario.url}; Ctrl-C ends the demo")
                    while True:
                        scenario.stay_healthy(60.0)
        except KeyboardInterrupt:
            output.show("stopping all processes")
            if exits:
                report.failure = "interrupted"
        except Exception as error:
            report.failure = (
                error.format_message() if isinstance(error, click.ClickException) else str(error)
            )
            output.show(f"the demo failed: {report.failure}")
        finally:
            output.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            stop_jobs(cluster.url)
            report.orphans = cluster.close()
    _conclude(report, cluster, output, report_path)
    ctx.exit(0 if report.succeeded() or (not exits and report.failure is None) else 1)


def _injectable(
    ctx: click.Context, requests: list[faults.FaultRequest], cluster: Cluster
) -> list[faults.FaultRequest]:
    """Return the faults to inject: all that were requested; of the default, those possible here."""
    is_requested = ctx.get_parameter_source("fault_list") is not ParameterSource.DEFAULT
    if is_requested or cluster.telemetry == "emulated":
        return requests
    return [request for request in requests if request.kind != "throttle"]


def _plan(
    node_count: int, axes: tuple[int, int, int], requests: list[faults.FaultRequest], exits: bool
) -> list[str]:
    """Return what the demo is going to do and how long it takes."""
    dp, pp, tp = axes
    ranks = dp * pp * tp
    minutes = START_MINUTES + (FAULT_MINUTES * len(requests) or HEALTHY_SECONDS / 60)
    names = ", ".join(request.kind for request in requests) or "none"
    ending = "then it ends" if exits else "then it runs until Ctrl-C"
    return [
        f"plan: 1 server, {node_count} nodes (1 spare) and {ranks} training "
        f"{'process' if ranks == 1 else 'processes'} (dp {dp} x pp {pp} x tp {tp}) on this machine",
        f"      faults: {names}; about {max(1, round(minutes))} min on two cores, {ending}",
    ]


def _start(cluster: Cluster, output: DemoOutput) -> None:
    """Start server and agents; print the dashboard's URL as soon as the server responds."""
    output.show(f"starting server and agents; logs: {cluster.directory}")
    cluster.launch()
    cluster.wait_for_server(lambda: output.progress("waiting for the server to respond"))
    with Client(cluster.url) as client:
        link = client.post("/login-links")["path"]
    output.show(f"dashboard: {cluster.url}")
    output.show(f"      to approve repairs there, open this link, once: {cluster.url}{link}")
    total = cluster.node_count
    cluster.wait_for_nodes(
        lambda reporting: output.progress(f"waiting for agents: {reporting} of {total} report")
    )
    output.show(f"{total} agents report to the server")
    if cluster.telemetry == "none":
        output.show("no C compiler (cc) found: no emulated GPUs, so the throttle fault is left out")
    elif cluster.telemetry == "driver":
        output.show(
            "GPU telemetry is from this machine's driver, so the throttle fault is left out"
        )
    else:
        output.show("GPUs are emulated: NVML calls reach an emulated driver, kernels are sleeps")


def _run_trainer(
    cluster: Cluster, axes: tuple[int, int, int], schedule: str, mode: str, seed: int
) -> str:
    """Start the smallest model that the axes allow: all ranks share this machine's cores."""
    return start_training(
        cluster,
        axes,
        mode,
        *("--schedule", schedule, "--seed", str(seed), "--emulate-kernel-ms", "20,40"),
        *("--global-batch-size", str(16 * axes[0]), "--checkpoint-every", "10"),
        *("--evaluate-every", "10"),
        *("--layers", str(max(2, axes[1])), "--heads", str(max(4, axes[2]))),
    )


def _conclude(
    report: DemoReport, cluster: Cluster, output: DemoOutput, report_path: Path | None
) -> None:
    """Print the result of each fault and the ledger. Keep the logs only after a failure."""
    for fault in report.faults:
        output.show(fault.line())
    if report.ledger:
        show_ledger(report.ledger)
        goodput = render.percent(report.ledger.get("goodput_ratio"))
        output.show(
            f"goodput {goodput}, {report.restarts} restarts, "
            f"{report.findings_while_healthy} false alarms, {report.orphans} processes left behind"
        )
    if report_path is not None:
        report.write(report_path)
    if report.succeeded():
        cluster.remove_logs()
    else:
        output.show(f"logs: {cluster.directory}")


def _end_with_parent() -> None:
    """End as on Ctrl-C when the parent process (make) is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C.

    Also SIGINT: a process that a script starts in the background ignores it by default.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
