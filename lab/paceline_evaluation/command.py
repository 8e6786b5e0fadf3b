"""`paceline evaluate`: how often the engine is right, measured on faults that are known."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from paceline_cli.options import OutputFile
from paceline_evaluation import report
from paceline_evaluation.campaign import Campaign
from paceline_evaluation.faults import KINDS, SYNTHETIC
from paceline_evaluation.real import RealArm
from paceline_evaluation.scoring import TrialVerdict, figures

ARMS = ("synthetic", "real")


def _names(known: tuple[str, ...], what: str, text: str) -> tuple[str, ...]:
    """`a,b` in the order of `known`; a name that is none is told with those that are."""
    asked = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=what)
    if not asked:
        raise click.BadParameter("name at least one", param_hint=what)
    return tuple(name for name in known if name in asked)


@click.command()
@click.option("--arms", default="synthetic", show_default=True, help="synthetic, real or both.")
@click.option("--seed", default=0, show_default=True, help="Decides every synthetic trial.")
@click.option("--trials", default=20, show_default=True, type=click.IntRange(1), help="Per kind.")
@click.option("--kinds", default=",".join(KINDS), metavar="LIST", help="Default: all.")
@click.option(
    "--largest", default=1024, show_default=True, type=click.IntRange(8), help="Ranks of a job."
)
@click.option(
    "--jobs", default=os.cpu_count() or 1, type=click.IntRange(1), help="Processes. Default: CPUs."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a Markdown table.")
@click.option("--output", type=OutputFile(), help="Write JSON here.")
@click.option("--misses", is_flag=True, help="Tell each miss and false alarm on stderr.")
def evaluate(
    arms: str,
    seed: int,
    trials: int,
    kinds: str,
    largest: int,
    jobs: int,
    as_json: bool,
    as_markdown: bool,
    output: Path | None,
    misses: bool,
) -> None:
    """Measure how well faults are found, named and explained.

    Plays jobs with known faults and judges what the engine says: see docs/evaluation.md. The real
    arm trains on this machine, with real processes, and takes minutes per kind; it leaves out the
    kinds that only the synthetic arm can make.
    """
    chosen_arms = _names(ARMS, "--arms", arms)
    chosen = _names(KINDS, "--kinds", kinds)
    real = tuple(kind for kind in chosen if kind not in SYNTHETIC)
    if chosen_arms == ("real",):
        chosen = real
    if not chosen:
        raise click.BadParameter("the real arm knows none of these", param_hint="--kinds")
    asked = {"synthetic": len(chosen), "real": len(real)}
    verdicts: list[TrialVerdict] = []
    tell = _ProgressLine(trials * sum(asked[arm] for arm in chosen_arms), misses)
    if "synthetic" in chosen_arms:
        campaign = Campaign(seed, trials, chosen, largest)
        verdicts += campaign.run(jobs, tell)
    if "real" in chosen_arms:
        verdicts += RealArm(real, trials, seed).run(tell)
    found = figures(verdicts, chosen)
    text = json.dumps(found, indent=2)
    if output is not None:
        output.write_text(text + "\n")
    if as_json:
        click.echo(text)
    elif as_markdown:
        click.echo(report.markdown(found))
    else:
        for line in report.show(found):
            click.echo(line)


class _ProgressLine:
    """On stderr, so that what is printed stays what was asked for."""

    def __init__(self, total: int, misses: bool) -> None:
        self.total, self.misses, self.done = total, misses, 0

    def __call__(self, verdict: TrialVerdict) -> None:
        self.done += 1
        if self.misses:
            self._tell(verdict)
        if self.done % 10 == 0 or self.done == self.total:
            click.echo(f"{self.done} of {self.total} trials", err=True)

    def _tell(self, verdict: TrialVerdict) -> None:
        name = f"{verdict.kind} {verdict.number} ({verdict.arm})"
        if verdict.kind != "none" and not verdict.hit:
            what = "NOT RIGHTLY NAMED" if verdict.detected else "NOT FOUND"
            click.echo(f"{name}: {what}: {verdict.note}", err=True)
        elif verdict.cause_right is False:
            click.echo(f"{name}: WRONG CAUSE: {verdict.note}", err=True)
        for alarm in (*verdict.clean_alarms, *verdict.other_alarms):
            click.echo(f"{name}: FALSE ALARM: {alarm} | {verdict.note}", err=True)
