"""Write the results of the campaign to `docs/reliability.md`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.reliability.trial import TrialResult

PATH = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN = "<!-- results of the campaign -->"
_END = "<!-- end of the results -->"
_HEADINGS = (
    "Fault",
    "Injected",
    "Right",
    "Outcome",
    "Seconds (median, most)",
    "Steps lost (most)",
    "Wrong culprits",
    "Duplicate restarts",
    "Steps destroyed",
    "Orphans",
)


def write(results: Sequence[TrialResult], path: Path = PATH) -> None:
    """Replace the results in the document."""
    text = path.read_text()
    begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    path.write_text(f"{text[:begin]}\n{table(results)}\n{text[end:]}")


def table(results: Sequence[TrialResult]) -> str:
    """Return a Markdown table with a row for each fault and a total."""
    names = list(dict.fromkeys(result.fault for result in results))
    rows = [_row(name, [each for each in results if each.fault == name]) for name in sorted(names)]
    lines = [_HEADINGS, ("---",) + ("---:",) * 2 + ("---",) + ("---:",) * 6, *rows]
    lines.append(_row("**All**", results))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(name: str, results: Sequence[TrialResult]) -> tuple[str, ...]:
    seconds = [result.seconds for result in results]
    outcomes = dict.fromkeys(result.outcome for result in results if result.is_right)
    return (
        name,
        str(len(results)),
        str(sum(result.is_right for result in results)),
        " or ".join(sorted(outcomes)) if name != "**All**" else "",
        f"{statistics.median(seconds):.0f}, {max(seconds):.0f}",
        str(max(result.lost_steps for result in results)),
        str(sum(len(result.wrong_culprits) for result in results)),
        str(sum(result.duplicates for result in results)),
        str(sum(result.steps_destroyed for result in results)),
        str(sum(result.orphans for result in results)),
    )
