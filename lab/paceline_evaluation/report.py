"""A campaign's figures as a table for people, and as Markdown for the documentation."""

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
    return [_row(kind, found) for kind, found in figures["by_kind"].items()]


def _row(kind: str, found: dict[str, Any]) -> list[str]:
    interval = found["ci95"]
    return [
        kind,
        str(found["n"]),
        _ratio(found["recall"]),
        "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        _ratio(found["top1"]),
        _ratio(found["cause_accuracy"]),
        _number(found["latency_steps_p50"]),
        _number(found["latency_steps_p90"]),
        _number(found["latency_seconds_p50"]),
        _number(found["latency_seconds_p90"]),
        str(found["false_alarms"]),
    ]


def sentences(figures: dict[str, Any]) -> list[str]:
    overall = figures["overall"]
    weak = figures["by_kind"].get("slow_rank", {}).get("weak")
    said = [
        f"{overall['faults']} faults of 10% and more: precision {_ratio(overall['precision'])}, "
        f"recall {_ratio(overall['recall'])}, F1 {_ratio(overall['f1'])}, right subject "
        f"{_ratio(overall['top1'])}, right cause {_ratio(overall['cause_accuracy'])}.",
        f"{overall['false_alarms_in_clean_steps']} false alarms in {overall['clean_steps']} clean "
        f"steps: {_number(overall['false_alarms_per_10k_steps'])} per 10,000.",
    ]
    if weak:
        said.append(f"Weaker slow ranks (5-10%): {_ratio(weak['recall'])} of {weak['n']} found.")
    return said


def markdown(figures: dict[str, Any]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    table = [line(COLUMNS), line(["---"] * len(COLUMNS)), *map(line, rows(figures))]
    return "\n".join([*table, "", *sentences(figures)])


def show(figures: dict[str, Any]) -> list[str]:
    """Prints the table; returns the sentences that go below it."""
    render.show_table(COLUMNS, rows(figures), "No trials.")
    return sentences(figures)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
