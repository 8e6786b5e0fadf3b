"""The figures of a campaign as a table on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline_cli import render

COLUMNS = (
    "kind",
    "n",
    "recall",
    "95%",
    "top-1",
    "cause",
    "steps p50",
    "p90",
    "s p50",
    "p90",
    "FA",
)


def rows(figures: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table: a row per kind, and for the foreign arm per fault and
    trainer."""
    groups = [figures[key] for key in ("by_kind", "by_way", "by_trainer") if key in figures]
    return [_row(name, result) for group in groups for name, result in group.items()]


def _row(kind: str, result: dict[str, Any]) -> list[str]:
    return [
        kind,
        str(result["n"]),
        _ratio(result["recall"]),
        interval_text(result["ci95"]),
        _ratio(result["top1"]),
        _ratio(result["cause_accuracy"]),
        number_text(result["latency_steps_p50"]),
        number_text(result["latency_steps_p90"]),
        number_text(result["latency_seconds_p50"]),
        number_text(result["latency_seconds_p90"]),
        str(result["false_alarms"]),
    ]


def sentences(figures: dict[str, Any]) -> list[str]:
    """Return the overall figures as sentences."""
    overall = figures["overall"]
    weak = figures["by_kind"].get("slow_rank", {}).get("weak")
    result = [
        f"{overall['faults']} faults of 10% (foreign arm: 20%) or more: "
        f"precision {_ratio(overall['precision'])}, recall {_ratio(overall['recall'])}, "
        f"F1 {_ratio(overall['f1'])}, correct subject {_ratio(overall['top1'])}, "
        f"correct cause {_ratio(overall['cause_accuracy'])}.",
        f"{overall['false_alarms_in_clean_steps']} false alarms in {overall['clean_steps']} clean "
        f"steps: {number_text(overall['false_alarms_per_10k_steps'])} per 10,000.",
    ]
    if (headline := overall["headline_accuracy"]) is not None:
        result.append(f"Hangs with the right line and exits with their cause: {_ratio(headline)}.")
    if (hours := overall["clean_hours"]) is not None:
        result.append(
            f"{overall['false_alarms_in_clean_steps']} warnings in {hours:.2f} healthy hours of "
            f"job time ({number_text(overall['warnings_per_10_hours'])} per 10 hours), "
            f"{overall['criticals']} of them critical."
        )
    result += [f"Skipped: {sentence}." for sentence in figures.get("skipped", ())]
    if weak:
        result.append(f"Slow ranks of 5-10%: recall {_ratio(weak['recall'])} of {weak['n']}.")
    return result


def markdown(figures: dict[str, Any]) -> str:
    """Return table and sentences as Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    table = [line(COLUMNS), line(["---"] * len(COLUMNS)), *map(line, rows(figures))]
    return "\n".join([*table, "", *sentences(figures)])


def show(figures: dict[str, Any]) -> list[str]:
    """Print the table. Return the sentences that go below it."""
    render.show_table(COLUMNS, rows(figures), "No trials.")
    return sentences(figures)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def interval_text(interval: Sequence[float] | None) -> str:
    """Return a confidence interval as text."""
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def number_text(value: float | None) -> str:
    """Return a number as text; "-" if it is unknown."""
    return "-" if value is None else f"{value:g}"
