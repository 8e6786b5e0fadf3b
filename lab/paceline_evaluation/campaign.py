"""Runs the trials of a campaign on several processes; their number does not change the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from paceline_evaluation.faults import KINDS
from paceline_evaluation.scoring import TrialVerdict, judge
from paceline_evaluation.trial import Length, run_trial


@dataclass(frozen=True, slots=True)
class Campaign:
    """`trials` of each kind; jobs of at most `largest` ranks."""

    seed: int
    trials: int
    kinds: tuple[str, ...]
    largest: int = 1024
    length: Length = field(default_factory=Length)

    def trial(self, kind: str, number: int) -> TrialVerdict:
        """Depends on nothing but the campaign's own fields, the kind and the number."""
        seed = (self.seed, KINDS.index(kind), number)
        return judge(run_trial(kind, seed, self.largest, self.length))

    def run(self, processes: int, tell: Callable[[TrialVerdict], None]) -> list[TrialVerdict]:
        """Verdicts by kind and number, whatever order they were reached in."""
        todo = [(kind, number) for kind in self.kinds for number in range(self.trials)]
        verdicts = []
        for verdict in self._verdicts(todo, processes):
            tell(verdict)
            verdicts.append(verdict)
        return verdicts

    def _verdicts(self, todo: Sequence[tuple[str, int]], processes: int) -> Iterator[TrialVerdict]:
        if processes == 1:
            for kind, number in todo:
                yield self.trial(kind, number)
            return
        # Fresh interpreters: what a forked one inherits (threads of numpy) could hang it.
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            yield from pool.map(_run, [(self, kind, number) for kind, number in todo])


def _run(task: tuple[Campaign, str, int]) -> TrialVerdict:
    campaign, kind, number = task
    return campaign.trial(kind, number)
