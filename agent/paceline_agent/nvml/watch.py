"""Runs jobs one after another, and leaves behind the one that does not come back.

All jobs share one thread, which costs nothing while they return. A job that is not done in time
keeps that thread, the others go on in a new one, and the job is not started again before it has
returned: as many threads hang as jobs, never more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

_POLL_SECONDS = 0.05
_LEAST_SECONDS = 0.3  # for a job whose round is over budget


class _Crew:
    """A thread that does jobs in turn until it is dismissed."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[tuple[Hashable, Any]] = queue.SimpleQueue()
        self.at: Hashable | None = None  # the job it is in
        self._orders: queue.SimpleQueue[list[tuple[Hashable, Callable[[], Any]]] | None]
        self._orders = queue.SimpleQueue()
        self._dismissed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def take(self, jobs: list[tuple[Hashable, Callable[[], Any]]]) -> None:
        self._orders.put(jobs)

    def dismiss(self) -> Hashable | None:
        """The job it is stuck in, None if it was between two. It begins no other."""
        with self._lock:
            self._dismissed = True
            self._orders.put(None)
            return self.at

    def _work(self) -> None:
        while (jobs := self._orders.get()) is not None:
            for key, job in jobs:
                with self._lock:
                    if self._dismissed:
                        return
                    self.at = key
                try:
                    answer = job()
                except Exception as error:  # the caller's to judge
                    answer = error
                with self._lock:
                    self.at = None
                    self.done.put((key, answer))


class Watch:
    """Jobs by key. `patience_seconds` is for one job, `budget_seconds` about that of a round."""

    def __init__(self, patience_seconds: float, budget_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._budget_seconds = budget_seconds
        self._crew: _Crew | None = None
        self._stuck: dict[Hashable, _Crew] = {}

    @property
    def stuck(self) -> set[Hashable]:
        """Keys of the jobs that have not returned yet."""
        self._stuck = {key: crew for key, crew in self._stuck.items() if crew.at is not None}
        return set(self._stuck)

    def run(self, jobs: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
        """What each job returned or raised; those that are stuck are missing."""
        answers: dict[Hashable, Any] = {}
        stuck = self.stuck
        waiting = {key: job for key, job in jobs.items() if key not in stuck}
        deadline = time.monotonic() + self._budget_seconds
        while waiting:
            crew = self._crew = self._crew or _Crew()
            crew.take(list(waiting.items()))
            while waiting:
                left = max(_LEAST_SECONDS, deadline - time.monotonic())
                try:
                    key, answer = crew.done.get(timeout=min(self._patience_seconds, left))
                except queue.Empty:
                    self._leave(crew, waiting, answers)
                    break
                answers[key] = answer
                del waiting[key]
        return answers

    def _leave(
        self,
        crew: _Crew,
        waiting: dict[Hashable, Callable[[], Any]],
        answers: dict[Hashable, Any],
    ) -> None:
        self._crew = None
        stuck = crew.dismiss()
        while not crew.done.empty():  # it came back at the last moment
            key, answer = crew.done.get()
            answers[key] = answer
            del waiting[key]
        if stuck is not None:
            self._stuck[stuck] = crew
            waiting.pop(stuck, None)

    def wait(self) -> None:
        """Until one of the stuck jobs has returned."""
        before = self.stuck
        while before and self.stuck == before:
            time.sleep(_POLL_SECONDS)
