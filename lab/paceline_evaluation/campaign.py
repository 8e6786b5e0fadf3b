"""Run the trials of a campaign on several processes. Their number does not change the result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from paceline_demo.cluster import die_with_parent
from paceline_evaluation.faults import KINDS
from paceline_evaluation.scoring import TrialVerdict, judge
from paceline_evaluation.trial import Length, run_trial


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign: `trials` trials of each kind, on jobs of at most `largest` ranks."""

    seed: int
    trials: int
    kinds: tuple[str, ...]
    largest: int = 1024
    length: Length = field(default_factory=Length)

    def trial(self, kind: str, number: int) -> TrialVerdict:
        """Run one trial. The result depends only on the campaign's fields, `kind` and `number`."""
        seed = (self.seed, KINDS.index(kind), number)
        return judge(run_trial(kind, seed, self.largest, self.length))

    def run(
        self,
        processes: int,
        report: Callable[[TrialVerdict], None],
        done: Collection[tuple[str, str, int]] = (),
    ) -> list[TrialVerdict]:
        """Return the verdicts ordered by kind and number; call `report` with each as it comes.

        Trials whose arm, kind and number are in `done` are left out.
        """
        tasks = [
            (kind, number)
            for kind in self.kinds
            for number in range(self.trials)
            if ("synthetic", kind, number) not in done
        ]
        verdicts = []
        for verdict in self._verdicts(tasks, processes):
            report(verdict)
            verdicts.append(verdict)
        return verdicts

    def _verdicts(self, tasks: Sequence[tuple[str, int]], processes: int) -> Iterator[TrialVerdict]:
        if processes == 1:
            for kind, number in tasks:
                yield self.trial(kind, number)
            return
        with process_pool(processes) as pool:
            yield from pool.map(_run, [(self, kind, number) for kind, number in tasks])


def process_pool(processes: int) -> ProcessPoolExecutor:
    """Return a pool whose processes end with this one, also if it is killed."""
    # Spawn, do not fork: a forked process can hang on locks of numpy's threads.
    return ProcessPoolExecutor(processes, get_context("spawn"), initializer=die_with_parent)


def _run(task: tuple[Campaign, str, int]) -> TrialVerdict:
    campaign, kind, number = task
    return campaign.trial(kind, number)
