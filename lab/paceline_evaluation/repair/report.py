"""The figures of the repair arm, as JSON, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from paceline_cli import render
from paceline_evaluation.repair.arm import RepairResults
from paceline_evaluation.repair.ettr import Ettr, with_one_step_time
from paceline_evaluation.repair.trial import FinalState, TrialResult, is_good
from paceline_evaluation.report import interval_text, number_text
from paceline_evaluation.scoring import wilson

COLUMNS = (
    "fault",
    "n",
    "right",
    "95%",
    "wrong restarts",
    "duplicates",
    "steps lost p50",
    "max",
    "s p50",
    "p90",
    "wrong culprits",
    "steps destroyed",
    "orphans",
    "torchrun: n",
    "recovered",
    "duplicates",
    "steps lost max",
    "s p50",
)


def figures(results: RepairResults, skipped: Sequence[str]) -> dict[str, Any]:
    """Return the figures of all trials, overall and in groups, as `--json` prints them."""
    found: dict[str, Any] = {"overall": _figures(results.trials)}
    groups: dict[str, Callable[[TrialResult], str]] = {
        "by_kind": lambda result: result.kind,
        "by_way": lambda result: result.fault,
        "by_trainer": lambda result: result.trainer,
    }
    for key, group in groups.items():
        names = dict.fromkeys(map(group, results.trials))
        found[key] = {
            name: _figures([one for one in results.trials if group(one) == name]) for name in names
        }
    baseline = [one for one in results.baseline if one.was_played]
    compared = {(one.kind, one.number) for one in baseline}
    same = [one for one in results.trials if (one.kind, one.number) in compared]
    found["torchrun"] = {
        "overall": _figures(baseline),
        "paceline": _figures(same),  # the same faults
        "by_way": {
            name: _figures([one for one in baseline if one.fault == name])
            for name in dict.fromkeys(one.fault for one in baseline)
        },
        "not_played": len(results.baseline) - len(baseline),
    }
    found["final_states"] = [_final_state(state) for state in results.final_states]
    found["ettr"] = [_ettr(one) for one in with_one_step_time(results.ettr)]
    found["healthy"] = None if results.healthy is None else asdict(results.healthy)
    found["skipped"] = list(skipped)
    return found


def _figures(results: Sequence[TrialResult]) -> dict[str, Any]:
    right = sum(result.is_right for result in results)
    recovered = [one for one in results if one.outcome == "recovered"]
    seconds = [one.seconds for one in recovered if one.seconds is not None]
    lost = [one.lost_steps for one in recovered]
    return {
        "n": len(results),
        "good": sum(map(is_good, results)),
        "right": right,
        "right_ratio": round(right / len(results), 4) if results else None,
        "ci95": wilson(right, len(results)),
        "recovered": len(recovered),
        "left_alone": sum(one.outcome == "left alone" for one in results),
        "restarts": sum(one.restarts for one in results),
        "wrong_restarts": sum(one.wrong_restarts for one in results),
        "duplicates": sum(one.duplicates for one in results),
        "wrong_culprits": sum(len(one.wrong_culprits) for one in results),
        "steps_lost_p50": _percentile(lost, 50),
        "steps_lost_most": max(lost, default=None),
        "steps_destroyed": sum(one.steps_destroyed for one in results),
        "orphans": sum(one.orphans for one in results),
        "seconds_p50": _percentile(seconds, 50),
        "seconds_p90": _percentile(seconds, 90),
        "seconds_most": max(seconds, default=None),
    }


def _final_state(state: FinalState) -> dict[str, Any]:
    return {**asdict(state), "is_equal": state.different == []}


def _ettr(ettr: Ettr) -> dict[str, Any]:
    return {
        **{
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(ettr).items()
        },
        "of_optimum": round(ettr.ratio, 4),
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the table: a row per kind, and below them per fault."""
    return [
        _row(name, result, found["torchrun"]["by_way"].get(name))
        for group in (found["by_kind"], dict(sorted(found["by_way"].items())))
        for name, result in group.items()
    ] + [_row("all", found["overall"], None)]


def _row(name: str, result: dict[str, Any], baseline: dict[str, Any] | None) -> list[str]:
    cells = [
        name,
        str(result["n"]),
        str(result["right"]),
        interval_text(result["ci95"]),
        str(result["wrong_restarts"]),
        str(result["duplicates"]),
        number_text(result["steps_lost_p50"]),
        number_text(result["steps_lost_most"]),
        number_text(result["seconds_p50"]),
        number_text(result["seconds_p90"]),
        *(str(result[key]) for key in ("wrong_culprits", "steps_destroyed", "orphans")),
    ]
    if baseline is None:
        return [*cells, "", "", "", "", ""]
    return [
        *cells,
        str(baseline["n"]),
        str(baseline["right"]),
        str(baseline["duplicates"]),
        number_text(baseline["steps_lost_most"]),
        number_text(baseline["seconds_p50"]),
    ]


def sentences(found: dict[str, Any]) -> list[str]:
    """Return the overall figures as sentences."""
    overall, torchrun = found["overall"], found["torchrun"]
    result = [
        f"{overall['n']} faults: {overall['right']} with the right outcome "
        f"({overall['recovered']} recovered, {overall['left_alone']} left alone), "
        f"{overall['wrong_restarts']} wrong restarts, {overall['duplicates']} duplicates, "
        f"{overall['wrong_culprits']} wrong culprits, {overall['steps_destroyed']} steps "
        f"destroyed, {overall['orphans']} orphans."
    ]
    if torchrun["overall"]["n"]:
        result.append(f"The same faults: {_compared(torchrun)}.")
    if torchrun["not_played"]:
        result.append(
            f"Faults that torchrun did not have, because its job did not train before: "
            f"{torchrun['not_played']}."
        )
    states = found["final_states"]
    if states:
        equal = sum(state["is_equal"] for state in states)
        result.append(
            f"{equal} of {len(states)} jobs ended with the state of an uninterrupted run, bit for "
            f"bit, after {sum(state['faults'] for state in states)} faults."
        )
    result += [_ettr_text(one) for one in found["ettr"]]
    if (healthy := found["healthy"]) is not None:
        result.append(
            f"Healthy jobs in noise: {healthy['real_restarts']} restarts in "
            f"{healthy['real_seconds'] / 3600:.2f} real hours, {healthy['simulated_restarts']} in "
            f"{healthy['simulated_seconds'] / 3600:.1f} simulated hours "
            f"({healthy['simulated_jobs']} jobs, {healthy['simulated_steps']} steps). Warnings: "
            f"{healthy['real_incidents']} and {healthy['simulated_incidents']}."
        )
    result += [f"Skipped: {sentence}." for sentence in found["skipped"]]
    return result


def _compared(torchrun: dict[str, Any]) -> str:
    def text(name: str, one: dict[str, Any]) -> str:
        return (
            f"{name} recovered {one['right']} of {one['n']}, {one['duplicates']} duplicates, at "
            f"most {number_text(one['steps_lost_most'])} steps lost, median "
            f"{number_text(one['seconds_p50'])} s"
        )

    return f"{text('Paceline', torchrun['paceline'])}; {text('torchrun', torchrun['overall'])}"


def _ettr_text(one: dict[str, Any]) -> str:
    return (
        f"ETTR of {one['launcher']} ({one['trainer']}, {one['faults']} faults in "
        f"{one['seconds']:.0f} s): {one['measured']:.3f}, {one['of_optimum']:.3f} of the optimum "
        f"{one['optimum']:.3f} with its downtime of {one['downtime_seconds']:.1f} s; "
        f"{one['repeated_steps']} steps repeated, {one['new_steps']} new ones of "
        f"{one['step_seconds'] * 1000:.1f} ms (its own: {one['own_step_seconds'] * 1000:.1f} ms)."
        f"{'' if one['recovered'] else ' It did not recover from the last fault.'}"
    )


def markdown(found: dict[str, Any]) -> str:
    """Return table and sentences as Markdown."""
    lines = [COLUMNS, ("---",) + ("---:",) * (len(COLUMNS) - 1), *rows(found)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *sentences(found)])


def show(found: dict[str, Any]) -> list[str]:
    """Print the table. Return the sentences that go below it."""
    render.show_table(COLUMNS, rows(found), "No trials.")
    return sentences(found)


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 3) if values else None
