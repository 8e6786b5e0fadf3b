"""`paceline demo`: the whole product on one machine, with real faults."""

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
from paceline_demo.training import start_training
from paceline_wire.address import SERVER_PORT

HEALTHY_SECONDS = 60.0  # of a run without faults
SETTLE_SECONDS = 6.0  # after the last repair
PROGRESS_SECONDS = 5.0  # between progress lines where no terminal can be rewritten


class Narrator:
    """Lines with the seconds since the start; a progress line below them on a terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.started = time.monotonic()
        self._status = self.console.status("") if self.console.is_terminal else None
        self._last = 0.0
        if self._status is not None:
            self._status.start()

    def say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self.started:6.1f} s] {text}", markup=False)

    def progress(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text.replace("[", "\\["))
        elif time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self.say(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def _power_of_two(ctx: click.Context, parameter: click.Parameter, value: int) -> int:
    if value not in (1, 2, 4, 8):
        raise click.BadParameter(f"expected 1, 2, 4 or 8 (it divides the layers), got {value}")
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
    help="Comma-separated: throttle:NODE, crash:RANK, hang:RANK, node-loss:NODE, slow-data:RANK, "
    "none. Numbers count from 0; without one, --seed chooses.",
)
@click.option("--seed", default=0, show_default=True, help="Chooses targets that are not named.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "approve", "observe"]),
    default="auto",
    show_default=True,
    help="auto repairs by itself, approve asks first, observe only reports.",
)
@click.option("--exit", "exits", is_flag=True, help="End by itself; status 0 only if all was well.")
@click.option("--report", "report_path", type=OutputFile(), help="Write the outcome as JSON.")
@click.option(
    "--port", default=SERVER_PORT, show_default=True, help="Of the dashboard, if it is free."
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
    """Train, break and repair on this machine.

    Starts a server, one agent per two ranks plus a spare node, and the reference trainer at
    dp x pp x tp on this Python's own sources; injects faults one after another; shows how each
    is found, named and repaired. Stays up until Ctrl-C unless --exit is given.
    """
    world_size = dp * pp * tp
    if world_size > 32:
        raise click.BadParameter(f"dp x pp x tp is {world_size}; one machine takes at most 32")
    node_count = -(-world_size // GPUS_PER_NODE) + 1
    requests = faults.parse(fault_list, world_size, node_count - 1)
    if exit_with_parent:
        _end_with_parent()
    report = DemoReport(mode=mode)
    narrator = Narrator()
    with _interruptible():
        cluster = Cluster(node_count, port)
        try:
            narrator.say(f"starting a server and {node_count} nodes, one of them spare")
            cluster.start()
            _announce(cluster, narrator)
            with Client(cluster.url) as client:
                scenario = Scenario(
                    client=client,
                    cluster=cluster,
                    mode=mode,
                    approve=exits,
                    chance=random.Random(seed),
                    start_job=lambda: _run_trainer(cluster, (dp, pp, tp), schedule, mode, seed),
                    say=narrator.say,
                    progress=narrator.progress,
                    report=report,
                )
                scenario.begin()
                for request in _injectable(ctx, requests, cluster):
                    scenario.play(request)
                scenario.stay_healthy(SETTLE_SECONDS if requests else HEALTHY_SECONDS)
                report.seconds = round(time.monotonic() - narrator.started, 1)
                if not exits:
                    narrator.say(f"staying up at {scenario.url} until Ctrl-C")
                    while True:
                        scenario.stay_healthy(60.0)
        except KeyboardInterrupt:
            narrator.say("stopping")
            if exits:
                report.failure = "interrupted"
        except Exception as error:
            report.failure = (
                error.format_message() if isinstance(error, click.ClickException) else str(error)
            )
            narrator.say(f"the demo could not go on: {report.failure}")
        finally:
            narrator.close()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            report.orphans = cluster.close()
    _conclude(report, cluster, narrator, report_path)
    ctx.exit(0 if report.succeeded() or (not exits and report.failure is None) else 1)


def _injectable(
    ctx: click.Context, requests: list[faults.Request], cluster: Cluster
) -> list[faults.Request]:
    """What was asked for by name is tried; of the default list, what this machine can do."""
    asked = ctx.get_parameter_source("fault_list") is not ParameterSource.DEFAULT
    if asked or cluster.telemetry == "emulated":
        return requests
    return [request for request in requests if request.kind != "throttle"]


def _announce(cluster: Cluster, narrator: Narrator) -> None:
    narrator.say(f"dashboard: {cluster.url}")
    if cluster.telemetry == "none":
        narrator.say("no C compiler (cc): going on without GPU telemetry, so no throttle fault")
    elif cluster.telemetry == "driver":
        narrator.say("GPU telemetry comes from this machine's driver; throttling is not injected")
    else:
        narrator.say("GPUs are emulated: an emulated driver answers NVML, kernels are sleeps")


def _run_trainer(
    cluster: Cluster, axes: tuple[int, int, int], schedule: str, mode: str, seed: int
) -> str:
    """As small as the axes allow: the host's cores are shared by all ranks."""
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
    report: DemoReport, cluster: Cluster, narrator: Narrator, report_path: Path | None
) -> None:
    """Say what became of each fault; keep the logs only if something went wrong."""
    for fault in report.faults:
        narrator.say(fault.line())
    if report.ledger:
        show_ledger(report.ledger)
        goodput = render.percent(report.ledger.get("goodput_ratio"))
        narrator.say(
            f"goodput {goodput}, {report.restarts} restarts, "
            f"{report.findings_while_healthy} false alarms, {report.orphans} orphans"
        )
    if report_path is not None:
        report.write(report_path)
    if report.succeeded():
        cluster.remove_logs()
    else:
        narrator.say(f"logs are kept in {cluster.directory}")


def _end_with_parent() -> None:
    """End as on Ctrl-C when the process that started us is gone (make, killed)."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP mean what Ctrl-C means.

    SIGINT too: what a script starts in the background is born deaf to it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
