"""The goodput ledger: every second of the job's life belongs to exactly one part.

The job's life runs from its creation to now (for an external job, from when its ranks attached).
Finished steps are placed on it in order, each from the mean start to the mean end of its ranks and
clipped to the time not yet used, so wrong clocks cannot create time. Short steps that were not
analyzed count like the step after them, as do those that the assembly dropped, because more arrived
at once than it holds, as far as there is time for them. The other time between steps is restart,
startup or idle. The work of steps that a restart repeats moves to `lost_seconds`, and what a
straggler cost before it was found moves from `imbalance_seconds` to `straggler_seconds`. A rank
that takes longer is an imbalance if it recurs: a single pause counts as `peer_wait_seconds`.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import fmean

import msgspec

from paceline_server.steps.types import Ledger, StepGoodput, StepSummary

# Steps that a restart can still revoke (about 100 bytes each). If a job goes back further, the
# older steps stay counted as useful.
MAXIMUM_REVOCABLE_STEPS = 1 << 16
RECURRING_STEPS = 256  # steps within which a loss recurs ...
SIMILAR = 2  # ... if the larger one is at most this multiple of the other one

_MEASURED = ("compute", "communication", "bubble", "data_wait", "optimizer", "checkpoint")
_SPLIT = tuple(name.removesuffix("_seconds") for name in StepGoodput.__struct_fields__)
_COUNTS = ("samples", "tokens", "dropped")


class _PartTimes(msgspec.Struct, array_like=True):
    """Nanoseconds of each part, and what was processed, of one step or summed over many."""

    compute: int = 0
    communication: int = 0
    bubble: int = 0
    data_wait: int = 0
    optimizer: int = 0
    checkpoint: int = 0
    other: int = 0
    straggler: int = 0
    peer_wait: int = 0
    bubble_excess: int = 0
    samples: int = 0
    tokens: int = 0
    slow_link: int = 0
    imbalance: int = 0
    evaluation: int = 0
    pause: int = 0  # an imbalance that has not recurred
    dropped: int = 0  # number of missing steps that it stands for; 0: it is of a finished step

    def add(self, times: _PartTimes, sign: int = 1) -> None:
        for part in self.__struct_fields__:
            setattr(self, part, getattr(self, part) + sign * getattr(times, part))

    def scaled(self, factor: float) -> _PartTimes:
        parts = self.__struct_fields__
        return _PartTimes(**{part: int(getattr(self, part) * factor) for part in parts})

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in self.__struct_fields__ if part not in _COUNTS)


class LedgerState(msgspec.Struct):
    """State of a `GoodputLedger`; survives a change of worker."""

    created_ns: int | None = None
    taken_until_ns: int = 0  # all time up to here is assigned
    generation: int | None = None
    resumed: bool = True  # whether the current generation has finished a step
    sums: _PartTimes = msgspec.field(default_factory=_PartTimes)  # sum over all useful steps
    revocable: list[tuple[int, _PartTimes]] = []  # (step, parts), newest last
    startup_ns: int = 0
    restart_ns: int = 0
    idle_ns: int = 0
    lost_ns: int = 0
    useful_steps: int = 0
    lost_steps: int = 0
    newest_step: int | None = None


class GoodputLedger:
    """Assigns the job's time to parts.

    Call `begin` at each generation, `add` for each step, `read` at any time.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        self._state = state or LedgerState()
        self._revocable = deque(self._state.revocable, MAXIMUM_REVOCABLE_STEPS)

    def state(self) -> LedgerState:
        return msgspec.structs.replace(self._state, revocable=list(self._revocable))

    def begin(self, generation: int, started_ns: int, resume_step: int | None) -> None:
        state = self._state
        if state.created_ns is None:
            state.created_ns = state.taken_until_ns = started_ns
        if state.generation is not None and generation <= state.generation:
            return
        state.generation = generation
        state.resumed = False
        if resume_step is not None:
            self._revoke_from(resume_step)

    def extend_back(self, began_ns: int) -> None:
        """Move the job's beginning back to `began_ns`; only before its first step."""
        state = self._state
        if state.created_ns is not None and not (state.useful_steps or state.lost_steps):
            state.created_ns = state.taken_until_ns = min(state.created_ns, began_ns)

    def add(self, summary: StepSummary, now_ns: int) -> None:
        """Add one finished step. Steps of older generations and repeated ones are ignored."""
        state = self._state
        if state.created_ns is None or summary.generation != state.generation:
            return
        if not state.resumed:
            self._revoke_from(summary.step)
        if state.newest_step is not None and summary.step <= state.newest_step:
            return
        started_ns = summary.mean_started_ns or summary.started_ns
        begin_ns = _clip(started_ns, state.taken_until_ns, now_ns)
        end_ns = _clip(started_ns + int(summary.mean_seconds * 1e9), begin_ns, now_ns)
        times = _part_times(summary, end_ns - begin_ns)
        times.samples, times.tokens = summary.samples or 0, summary.tokens or 0
        self._judge_imbalance(times)
        gap_ns = begin_ns - state.taken_until_ns
        if state.newest_step is not None and state.resumed:
            gap_ns -= self._add_missing(summary, times, gap_ns, state.newest_step + 1)
        self._add_gap(gap_ns)
        state.taken_until_ns = end_ns
        state.newest_step = summary.step
        state.resumed = True
        state.useful_steps += 1
        state.sums.add(times)
        self._revocable.append((summary.step, times))

    def _add_missing(self, summary: StepSummary, after: _PartTimes, gap_ns: int, first: int) -> int:
        """Add the steps from `first` on that are missing before one with the times `after`.

        Return the nanoseconds they took. Of those that were not skipped, a script's own numbers may
        leave some out: there is no time for those.
        """
        count = summary.skipped
        length_ns = min(gap_ns, int(summary.skipped_seconds * 1e9))
        if not count:
            length_ns = min(gap_ns, (summary.step - first) * after.total)
            count = min(summary.step - first, round(length_ns / max(after.total, 1)))
        if not count or not after.total:
            return 0
        times = after.scaled(length_ns / after.total)
        times.samples, times.tokens = after.samples * count, after.tokens * count
        times.other += length_ns - times.total
        times.dropped = count
        self._state.useful_steps += count
        self._state.sums.add(times)
        self._revocable.append((first, times))
        return length_ns

    def blame_straggler(self, onset_step: int) -> None:
        """Count what slower ranks have cost since a step as a straggler's, which has been found."""
        for step, times in reversed(self._revocable):
            if step < onset_step:
                return
            self._move(times, "pause", "straggler")
            self._move(times, "imbalance", "straggler")

    def _judge_imbalance(self, times: _PartTimes) -> None:
        """Make the imbalance of a new step a pause, unless other steps had a similar one."""
        if not times.imbalance:
            return
        similar = [
            earlier
            for _, earlier in islice(reversed(self._revocable), RECURRING_STEPS)
            if _is_similar(earlier.imbalance + earlier.pause, times.imbalance)
        ]
        if not similar:
            times.pause, times.imbalance = times.imbalance, 0
        for earlier in similar:
            if earlier.pause:
                self._move(earlier, "pause", "imbalance")

    def _move(self, times: _PartTimes, source: str, target: str) -> None:
        """Count a part of a step that was added as another one."""
        moved = getattr(times, source)
        for counted in (times, self._state.sums):
            setattr(counted, source, getattr(counted, source) - moved)
            setattr(counted, target, getattr(counted, target) + moved)

    def _add_gap(self, gap_ns: int) -> None:
        startup, restart, idle = self._gap_parts(gap_ns)
        self._state.startup_ns += startup
        self._state.restart_ns += restart
        self._state.idle_ns += idle

    def _gap_parts(self, gap_ns: int) -> tuple[int, int, int]:
        """Return the time without a step as (startup, restart, idle)."""
        state = self._state
        if state.resumed:
            return 0, 0, gap_ns
        if state.useful_steps or state.lost_steps:
            return 0, gap_ns, 0
        return gap_ns, 0, 0

    def _revoke_from(self, step: int) -> None:
        """Count the steps from `step` on as lost, because they will be repeated."""
        state = self._state
        while self._revocable and self._revocable[-1][0] >= step:
            _, times = self._revocable.pop()
            state.sums.add(times, -1)
            state.lost_ns += times.total
            count = times.dropped or 1
            state.lost_steps += count
            state.useful_steps -= count
        state.newest_step = self._revocable[-1][0] if self._revocable else None

    def read(self, now_ns: int) -> Ledger:
        """Return the ledger as of `now_ns`; time since the last step counts as idle for now."""
        state = self._state
        if state.created_ns is None:
            return Ledger()
        now_ns = max(now_ns, state.taken_until_ns)
        wall_ns = now_ns - state.created_ns
        startup, restart, idle = self._gap_parts(now_ns - state.taken_until_ns)
        sums = state.sums
        useful_ns = sums.compute + sums.optimizer + sums.communication + sums.bubble
        return Ledger(
            wall_seconds=wall_ns / 1e9,
            compute_seconds=sums.compute / 1e9,
            communication_seconds=sums.communication / 1e9,
            bubble_seconds=sums.bubble / 1e9,
            straggler_seconds=sums.straggler / 1e9,
            imbalance_seconds=sums.imbalance / 1e9,
            slow_link_seconds=sums.slow_link / 1e9,
            peer_wait_seconds=(sums.peer_wait + sums.pause) / 1e9,
            bubble_excess_seconds=sums.bubble_excess / 1e9,
            data_wait_seconds=sums.data_wait / 1e9,
            optimizer_seconds=sums.optimizer / 1e9,
            evaluation_seconds=sums.evaluation / 1e9,
            checkpoint_seconds=sums.checkpoint / 1e9,
            lost_seconds=state.lost_ns / 1e9,
            restart_seconds=(state.restart_ns + restart) / 1e9,
            startup_seconds=(state.startup_ns + startup) / 1e9,
            idle_seconds=(state.idle_ns + idle + sums.other) / 1e9,
            goodput_ratio=useful_ns / wall_ns if wall_ns else None,
            ettr_ratio=(sums.total - sums.checkpoint) / wall_ns if wall_ns else None,
            useful_steps=state.useful_steps,
            lost_steps=state.lost_steps,
            samples=sums.samples or None,
            tokens=sums.tokens or None,
        )


def _clip(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _is_similar(one: int, other: int) -> bool:
    return max(one, other) <= SIMILAR * min(one, other)


def _part_times(summary: StepSummary, length_ns: int) -> _PartTimes:
    """Return the means over ranks, scaled to sum to `length_ns`."""
    ranks, seconds = summary.ranks, summary.mean_seconds
    if not ranks or seconds <= 0:
        return _PartTimes(other=length_ns)
    means = {part: fmean(getattr(rank, f"{part}_seconds") for rank in ranks) for part in _MEASURED}
    if summary.goodput is not None:
        means |= {part: getattr(summary.goodput, f"{part}_seconds") for part in _SPLIT}
    scale = length_ns / max(seconds, sum(means.values()))
    times = _PartTimes(**{part: int(mean * scale) for part, mean in means.items()})
    times.other = length_ns - times.total
    return times
