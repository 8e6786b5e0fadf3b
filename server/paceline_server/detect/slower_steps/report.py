"""The words of a finding about slower steps: the part that became longer, its ranks, and advice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline_server.detect.finding import Evidence
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.slower_steps.awaited_rank import AwaitedRank
from paceline_server.detect.slower_steps.typical_step import (
    COLLECTION,
    COMPUTE,
    DATA,
    OWN_PARTS,
    PARTS,
    TRANSFERS,
    WAITS,
    StepParts,
)
from paceline_server.medians import median

NOTABLE = 0.1  # share of the increase from which a part is evidence
WAITS_EXCEED = 0.4  # a part that grew by this share of the waits explains them
ALSO_SLOWER = 0.5  # a rank is slower too if it grew by this share of the typical one

_SCRIPT = "check what the script does since then: longer inputs, unfrozen layers, another phase"
_AWAITED = "check what it does since then: longer inputs or outputs, another phase, its caches"
_ADVICE: dict[str | None, str] = {
    COMPUTE: f"Compare clocks, power limits and temperatures with those before the onset, and "
    f"{_SCRIPT}.",
    DATA: "Check the file system or data server that all ranks read from, and who else uses it.",
    TRANSFERS: "Check the network that all ranks share: other jobs on the switch, congestion.",
    COLLECTION: "Find what the script keeps alive: each garbage collection visits all objects.",
}
RESTART_ADVICE = (
    "Compare the nodes, the network and the software of both generations: `paceline preflight` "
    "measures the nodes."
)
_OTHER_ADVICE = f"Profile one rank, and {_SCRIPT}."


def advice(part: str | None, awaited: AwaitedRank | None) -> str:
    """Return what to check when this part of all steps became longer; None: not known.

    `awaited`: the rank without steps that explains it, if there is one.
    """
    if awaited is not None:
        return f"Profile rank {awaited.rank}, and {_AWAITED}."
    return _ADVICE.get(part, _OTHER_ADVICE)


def longer_part(before: StepParts, now: StepParts) -> tuple[str | None, float]:
    """Return the part that became longest, and its share of the increase; None if not known.

    Ranks wait longer where others, or earlier stages of a pipeline, became slower: waits are
    named only if nothing else explains most of the increase.
    """
    more = now.parts - before.parts
    if np.isnan(more).any():
        return None, 0.0
    direct = np.array([part != WAITS for part in PARTS])
    first = int(np.where(direct, more, -np.inf).argmax())
    if more[first] < WAITS_EXCEED * more.max():
        first = int(more.argmax())
    return PARTS[first], float(more[first] / max(now.seconds - before.seconds, 1e-9))


def evidence(before: StepParts, now: StepParts, awaited: AwaitedRank | None) -> list[Evidence]:
    """Return the parts that became longer, those that grew most first.

    In front of them the waits for a rank without steps, if they explain it.
    """
    more = now.parts - before.parts
    notable = NOTABLE * max(now.seconds - before.seconds, 0.0)
    longer = [
        (PARTS[part], now.parts[part], before.parts[part])
        for part in np.argsort(-more).tolist()
        if more[part] >= notable
    ]
    if awaited is not None:
        what = f"waits for rank {awaited.rank}, which has no steps"
        longer.insert(0, (what, awaited.seconds, awaited.seconds_before))
    return [
        Evidence(
            f"{what}: {duration(seconds)} per step, {duration(earlier)} before",
            "step_seconds",
            float(seconds),
            float(earlier),
        )
        for what, seconds, earlier in longer
    ]


def on_ranks(before: StepParts, now: StepParts, part: str | None) -> str:
    """Return on which ranks, if their own time became longer."""
    if part not in OWN_PARTS:
        return ""
    more = now.own - before.own
    known = np.flatnonzero(~np.isnan(more))
    slower = known[more[known] >= ALSO_SLOWER * median(more[known])]
    if slower.size == known.size:
        return " on all ranks" if known.size > 1 else ""
    return f" on {slower.size} of {known.size} ranks ({ranks_text(slower.tolist())})"


def slowest(before: StepParts, now: StepParts, ranks: Sequence[int]) -> int:
    """Return the one of these ranks whose own time grew most; the first if that is not known."""
    more = (now.own - before.own)[list(ranks)]
    return ranks[int(np.where(np.isnan(more), -np.inf, more).argmax())]


def duration(seconds: float) -> str:
    """Return `84 ms`, or `1.25 s`."""
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.0f} ms"
