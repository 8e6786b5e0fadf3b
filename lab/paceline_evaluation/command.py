"""The command `paceline evaluate`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
from pydantic import TypeAdapter

from paceline_cli.options import OutputFile
from paceline_cli.termination import interrupted_once
from paceline_evaluation import report
from paceline_evaluation.campaign import Campaign
from paceline_evaluation.faults import KINDS, SYNTHETIC
from paceline_evaluation.foreign import plan
from paceline_evaluation.foreign.arm import ForeignArm
from paceline_evaluation.real import RealArm
from paceline_evaluation.repair import arm as repair
from paceline_evaluation.repair import report as repair_report
from paceline_evaluation.results_file import ResultsFile
from paceline_evaluation.scoring import TrialVerdict, figures

ARMS = ("synthetic", "real", "foreign", "repair")
_ALL_KINDS = tuple(dict.fromkeys((*KINDS, *repair.KINDS)))


def _parse_names(valid: tuple[str, ...], option: str, text: str) -> tuple[str, ...]:
    """Return the names in `text` (`a,b`) in the order of `valid`.

    Raises:
        click.BadParameter: a name is not valid, or there is none.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in valid:
            raise click.BadParameter(
                f"unknown name {name!r}; expected {', '.join(valid)}", param_hint=option
            )
    if not names:
        raise click.BadParameter("expected at least one name", param_hint=option)
    return tuple(name for name in valid if name in names)


@click.command()
@click.option(
    "--arms",
    default="synthetic",
    show_default=True,
    metavar="LIST",
    help="Comma-separated list of synthetic, real, foreign; or repair.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the random choices; the same seed repeats the synthetic trials.",
)
@click.option(
    "--trials", default=20, show_default=True, type=click.IntRange(1), help="Trials per kind."
)
@click.option(
    "--kinds",
    default=",".join(_ALL_KINDS),
    metavar="LIST",
    help="Comma-separated kinds of faults.  [default: all]",
)
@click.option(
    "--largest",
    default=1024,
    show_default=True,
    type=click.IntRange(2),
    help="Largest number of ranks of a job; in the synthetic arm 8 or more.",
)
@click.option(
    "--jobs",
    default=os.cpu_count() or 1,
    type=click.IntRange(1),
    help="Number of processes.  [default: number of CPUs]",
)
@click.option(
    "--healthy-seconds",
    default=60,
    show_default=True,
    type=click.IntRange(10),
    help="Length of a trial without a fault, in the foreign arm.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table.")
@click.option(
    "--output", type=OutputFile(), help="Write the JSON to this file, also while the trials run."
)
@click.option(
    "--continue",
    "continued",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Add to the trials in this file, which an interrupted run with the same options wrote.",
)
@click.option("--misses", is_flag=True, help="Print each miss and false alarm to stderr.")
def evaluate(
    arms: str,
    seed: int,
    trials: int,
    kinds: str,
    largest: int,
    jobs: int,
    healthy_seconds: int,
    as_json: bool,
    as_markdown: bool,
    output: Path | None,
    continued: Path | None,
    misses: bool,
) -> None:
    """Measure how well faults are detected, located and explained.

    Runs jobs with known faults and compares them with the findings of the engine; see
    docs/evaluation.md. The real arm trains with real processes on this machine, takes minutes per
    kind, and skips the kinds that only the synthetic arm supports. The foreign arm runs trainings
    of torch, Hugging Face and Lightning that do not know Paceline.

    The repair arm measures what becomes of trainings when something fails; see docs/reliability.md.
    """
    chosen_arms = _parse_names(ARMS, "--arms", arms)
    chosen = _parse_names(_ALL_KINDS, "--kinds", kinds)
    supported = {
        "synthetic": KINDS,
        "real": tuple(kind for kind in KINDS if kind not in SYNTHETIC),
        "foreign": plan.KINDS,
        "repair": repair.KINDS,
    }
    kinds_of = {
        arm: tuple(kind for kind in chosen if kind in supported[arm]) for arm in chosen_arms
    }
    chosen = tuple(kind for kind in chosen if any(kind in some for some in kinds_of.values()))
    if not chosen:
        raise click.BadParameter(
            f"the {' and the '.join(chosen_arms)} arm does not support these kinds",
            param_hint="--kinds",
        )
    campaign = {
        "arms": list(chosen_arms),
        "seed": seed,
        "trials": trials,
        "kinds": list(chosen),
        "largest": largest,
        "healthy_seconds": healthy_seconds,
    }
    show = partial(_print, as_json=as_json, as_markdown=as_markdown)
    if "repair" in chosen_arms:
        if len(chosen_arms) > 1:
            raise click.BadParameter("the repair arm runs alone", param_hint="--arms")
        arm = repair.RepairArm(chosen, trials, seed)
        campaign["skipped"] = arm.skipped
        repair_file = ResultsFile(output, campaign, TypeAdapter(repair.RepairResults))
        _run_repair(arm, repair_file, continued, misses, show)
        return
    foreign = None
    if "foreign" in chosen_arms:
        foreign = ForeignArm(
            kinds_of["foreign"], trials, seed, largest=largest, none_seconds=healthy_seconds
        )
    skipped = [] if foreign is None else foreign.skipped
    campaign["skipped"] = list(skipped)
    file = ResultsFile(output, campaign, TypeAdapter(list[TrialVerdict]))
    verdicts = file.read(continued) if continued else []
    done = {(one.arm, one.kind, one.number) for one in verdicts}
    progress = _ProgressLine(trials * sum(map(len, kinds_of.values())), misses)
    progress.add(len(verdicts))

    def content() -> dict[str, Any]:
        return file.content({**figures(verdicts, chosen), "skipped": skipped}, verdicts)

    def judged(verdict: TrialVerdict) -> None:
        verdicts.append(verdict)
        progress(verdict)
        file.write_part(content)

    def finish() -> None:
        result = content()
        file.write(result)
        show(result, report)

    try:
        with _figures_of_part(progress):
            if "synthetic" in chosen_arms:
                synthetic = Campaign(seed, trials, kinds_of["synthetic"], max(largest, 8))
                synthetic.run(jobs, judged, done)
            if "real" in chosen_arms:
                RealArm(kinds_of["real"], trials, seed).run(judged, done)
            if foreign is not None:
                foreign.run(judged, done)
    except Exception:
        if verdicts:  # hours of trials may precede an error
            finish()
        raise
    finish()
    progress.exit_if_interrupted()


def _run_repair(
    arm: repair.RepairArm,
    file: ResultsFile[repair.RepairResults],
    continued: Path | None,
    misses: bool,
    show: Callable[[dict[str, Any], _ArmReport], None],
) -> None:
    results = file.read(continued) if continued else repair.RepairResults()
    progress = _ProgressLine(arm.total, misses)

    def content() -> dict[str, Any]:
        return file.content(repair_report.figures(results, arm.skipped), results)

    def played(trials: int, miss: str) -> None:
        progress.add(trials, miss)
        if trials:
            file.write_part(content)

    try:
        with _figures_of_part(progress):
            arm.run(played, results)
    finally:  # those of the trials before an error, too
        result = content()
        file.write(result)
        show(result, repair_report)
    progress.exit_if_interrupted()


class _ArmReport(Protocol):
    """The module that shows the figures of an arm."""

    def markdown(self, figures: dict[str, Any], /) -> str: ...

    def show(self, figures: dict[str, Any], /) -> list[str]: ...


@contextlib.contextmanager
def _figures_of_part(progress: _ProgressLine) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the trials, not the report of those that are done."""
    try:
        with interrupted_once():
            yield
    except KeyboardInterrupt:
        progress.interrupted = True
        if progress.done == 0:
            raise


def _print(result: dict[str, Any], shown: _ArmReport, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        click.echo(json.dumps(result, indent=2))
    elif as_markdown:
        click.echo(shown.markdown(result))
    else:
        for line in shown.show(result):
            click.echo(line)


class _ProgressLine:
    """Progress, and misses if requested, on stderr; stdout has only the result."""

    def __init__(self, total: int, misses: bool) -> None:
        self.total, self.misses, self.done = total, misses, 0
        self.interrupted = False

    def __call__(self, verdict: TrialVerdict) -> None:
        if self.misses:
            self._print_misses(verdict)
        self.add(1)

    def add(self, trials: int, miss: str = "") -> None:
        """Count trials; `miss` is the text about one that is not as required."""
        if self.misses and miss:
            click.echo(miss, err=True)
        before, self.done = self.done, self.done + trials
        if self.done // 10 > before // 10 or self.done == self.total > before:
            click.echo(f"{self.done} of {self.total} trials", err=True)

    def exit_if_interrupted(self) -> None:
        if self.interrupted:
            click.echo(f"Interrupted: these are {self.done} of {self.total} trials.", err=True)
            sys.exit(130)

    def _print_misses(self, verdict: TrialVerdict) -> None:
        name = f"{verdict.kind} {verdict.number} ({verdict.arm})"
        if verdict.kind != "none" and not verdict.hit:
            outcome = "WRONG SUBJECT" if verdict.detected else "NOT DETECTED"
            click.echo(f"{name}: {outcome}: {verdict.note}", err=True)
        elif verdict.cause_correct is False:
            click.echo(f"{name}: WRONG CAUSE: {verdict.note}", err=True)
        if verdict.headline_correct is False:
            click.echo(f"{name}: WRONG HEADLINE: {verdict.note}", err=True)
        for alarm in (*verdict.clean_alarms, *verdict.other_alarms):
            click.echo(f"{name}: FALSE ALARM: {alarm} | {verdict.note}", err=True)
