"""Runs jobs one after another and skips a job that does not return.

All jobs share one thread. A job that exceeds its time keeps that thread, the others continue in a
new one, and the job is not started again before it has returned: there are never more hanging
threads than hanging jobs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from paceline_agent.collect.scheduling import Runnable, is_starved, thread_runnable

_POLL_SECONDS = 0.05
_LEAST_SECONDS = 0.3  # at least, for a job whose round is over budget
_WATCHED_SECONDS = 0.2  # the end of a job's time, in which it is observed whether the job is stuck
_STARVED_SECONDS = 10.0  # limit of a job that runs or waits for a CPU


class _JobThread:
    """A thread that runs jobs in turn until it is dismissed; `finished` is set once a round."""

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.answers: dict[Hashable, Any] = {}  # results of the round
        self.at: Hashable | None = None  # the current job
        self._began = 0.0  # start of the current job
        self._orders: queue.SimpleQueue[list[tuple[Hashable, Callable[[], Any]]] | None]
        self._orders = queue.SimpleQueue()
        self._dismissed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="nvml", daemon=True)
        self._thread.start()

    def take(self, jobs: list[tuple[Hashable, Callable[[], Any]]]) -> None:
        self.answers = {}
        self._orders.put(jobs)

    @property
    def seconds_in_job(self) -> float:
        with self._lock:
            return 0.0 if self.at is None else time.monotonic() - self._began

    def runnable(self) -> Runnable | None:
        """Return how long the thread has run or waited for a CPU; None: unknown."""
        return thread_runnable(self._thread.native_id or 0)

    def dismiss(self) -> Hashable | None:
        """Start no further job; return the job in which it hangs, or None."""
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
                except Exception as error:  # the caller handles it
                    answer = error
                with self._lock:
                    self.at = None
                    if not self._dismissed:
                        self.answers[key] = answer
            self.finished.put(None)


class Watch:
    """Runs jobs by key; `patience_seconds` limits one job, `budget_seconds` roughly a round."""

    def __init__(self, patience_seconds: float, budget_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._budget_seconds = budget_seconds
        self._thread: _JobThread | None = None
        self._stuck: dict[Hashable, _JobThread] = {}

    @property
    def stuck(self) -> set[Hashable]:
        """Keys of the jobs that have not returned yet."""
        self._stuck = {key: thread for key, thread in self._stuck.items() if thread.at is not None}
        return set(self._stuck)

    def run(self, jobs: Mapping[Hashable, Callable[[], Any]]) -> dict[Hashable, Any]:
        """Return the result or exception of each job; hanging jobs are missing."""
        answers: dict[Hashable, Any] = {}
        stuck = self.stuck
        waiting = {key: job for key, job in jobs.items() if key not in stuck}
        deadline = time.monotonic() + self._budget_seconds
        while waiting:
            thread = self._thread = self._thread or _JobThread()
            thread.take(list(waiting.items()))
            if not self._wait_finished(thread, deadline):
                self._thread = None
                left_in = thread.dismiss()
                if left_in is not None:
                    self._stuck[left_in] = thread
                    waiting.pop(left_in, None)
            answers |= thread.answers
            waiting = {key: job for key, job in waiting.items() if key not in answers}
        return answers

    def _wait_finished(self, thread: _JobThread, deadline: float) -> bool:
        """Wait for the end of the round; return False if one job is stuck or takes too long."""
        # since when, and its runnable time at that point
        watched: tuple[float, Runnable | None] | None = None
        while True:
            now = time.monotonic()
            least = max(_LEAST_SECONDS, deadline - now)
            left = min(self._patience_seconds, least) - thread.seconds_in_job
            if left > _WATCHED_SECONDS:
                timeout, watched = left - _WATCHED_SECONDS, None
            else:
                if watched is not None and now - watched[0] >= _WATCHED_SECONDS:
                    since, before = watched
                    if not is_starved(before, thread.runnable(), now - since):
                        return False
                    if thread.seconds_in_job > _STARVED_SECONDS:
                        return False
                    watched = None
                watched = watched or (now, thread.runnable())
                timeout = _WATCHED_SECONDS - (now - watched[0])
            with contextlib.suppress(queue.Empty):
                thread.finished.get(timeout=timeout)
                return True

    def wait(self) -> None:
        """Wait until one of the hanging jobs has returned."""
        before = self.stuck
        while before and self.stuck == before:
            time.sleep(_POLL_SECONDS)
