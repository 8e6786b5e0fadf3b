"""Runs jobs one after another, and leaves behind the one that does not come back.

All jobs share one thread, which costs nothing while they return. A job that is not done in time
keeps that thread, the others go on in a new one, and the job is not started again before it has
returned: as many threads hang as jobs, never more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

_POLL_SECONDS = 0.05
_LEAST_SECONDS = 0.3  # for a job whose round is over budget


class _Crew:
    """A thread that does jobs in turn until it is dismissed. `finished` is put once a round."""

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.answers: dict[Hashable, Any] = {}  # of the round
        self.at: Hashable | None = None  # the job it is in
        self._began = 0.0  # when it began that
        self._orders: queue.SimpleQueue[list[tuple[Hashable, Callable[[], Any]]] | None]
        self._orders = queue.SimpleQueue()
        self._dismissed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    def take(self, jobs: list[tuple[Hashable, Callable[[], Any]]]) -> None:
        self.answers = {}
        self._orders.put(jobs)

    @property
    def seconds_in_job(self) -> float:
        with self._lock:
            return 0.0 if self.at is None else time.monotonic() - self._began

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
                    self.at, self._began = key, time.monotonic()
                try:
                    answer = job()
                except Exception as error:  # the caller's to judge
                    answer = error
                with self._lock:
                    self.at = None
                    if not self._dismissed:
                        self.answers[key] = answer
            self.finished.put(None)


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
            if not self._see_finished(crew, deadline):
                self._crew = None
                left_in = crew.dismiss()
                if left_in is not None:
                    self._stuck[left_in] = crew
                    waiting.pop(left_in, None)
            answers |= crew.answers
            waiting = {key: job for key, job in waiting.items() if key not in answers}
        return answers

    def _see_finished(self, crew: _Crew, deadline: float) -> bool:
        """False if it is in one job for too long."""
        while True:
            least = max(_LEAST_SECONDS, deadline - time.monotonic())
            left = min(self._patience_seconds, least) - crew.seconds_in_job
            if left <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                crew.finished.get(timeout=left)
                return True

    def wait(self) -> None:
        """Until one of the stuck jobs has returned."""
        before = self.stuck
        while before and self.stuck == before:
            time.sleep(_POLL_SECONDS)
