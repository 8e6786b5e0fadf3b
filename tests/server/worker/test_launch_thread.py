"""The thread that carries out requests to launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from paceline_server.decide.types import LaunchRequest, LaunchResult
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import (
    LauncherParts,
    LauncherUnavailableError,
    ShownRequest,
)
from paceline_server.store import launches
from paceline_server.store.database import Database
from paceline_server.store.models import ActionRow, LaunchRow
from paceline_server.store.signals import CommitSignals
from paceline_server.worker.launch_thread import LaunchThread
from tests.server.rows import request_restart, toy_job

START_NS = 1_700_000_000_000_000_000


class ReadyLauncher:
    """A launcher that has done each request at once."""

    name: ClassVar[str] = "ready"

    @classmethod
    def create(cls, _parts: LauncherParts) -> Self:
        return cls()

    @classmethod
    def recognize(cls, _metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
        return None

    def observe(self, _request: LaunchRequest) -> ShownRequest:
        return ShownRequest(state="done", detail="It runs again.")

    def begin(self, _request: LaunchRequest, _seen: ShownRequest) -> None:
        raise AssertionError("there is nothing to begin")

    def close(self) -> None:
        pass


class UnreadableLauncher(ReadyLauncher):
    """A launcher whose answer the backend cannot read."""

    name: ClassVar[str] = "unreadable"

    def observe(self, _request: LaunchRequest) -> ShownRequest:
        raise ValueError("invalid literal for int() with base 10: 'N/A'")


@pytest.fixture
def thread(database: Database) -> LaunchThread:
    """The thread, not started; two committed requests, the first to the unreadable launcher."""
    with database.write() as session:
        session.add(toy_job("job-1", state="recovering", watched=True))
        session.flush()
        for number, launcher in enumerate((UnreadableLauncher, ReadyLauncher)):
            request(session, f"act-{number}", launcher.name, START_NS + number)
    backends = {one.name: one() for one in (UnreadableLauncher, ReadyLauncher)}
    return LaunchThread(database, CommitSignals(), "me", 10**9, backends, lambda: START_NS)


def request(session: Session, action_id: str, launcher: str, now_ns: int) -> None:
    launch = Launch(launcher=launcher, job="7", restarts=0, nodes={})
    intent = LaunchRequest(
        action_id=action_id, kind="restart", launch=launch, reason="Rank 1 crashed."
    )
    request_restart(session, "job-1", intent, now_ns)


def results(database: Database) -> dict[str, LaunchResult]:
    with database.read() as session:
        return {row.action_id: row.result for row in session.scalars(select(LaunchRow))}


def test_a_backend_that_fails_does_not_end_the_requests_to_others(
    database: Database, thread: LaunchThread
) -> None:
    assert thread.run_pass()
    failed, done = results(database)["act-0"], results(database)["act-1"]
    assert failed.state == "waiting", "it is repeated"
    assert "unreadable: ValueError" in failed.detail
    assert done.state == "done"


class AbsentLauncher(ReadyLauncher):
    """A launcher that does not answer at first."""

    name: ClassVar[str] = "absent"

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.answers = False
        self.before_it_answers: Callable[[], None] = lambda: None

    def observe(self, _request: LaunchRequest) -> ShownRequest:
        if not self.answers:
            raise LauncherUnavailableError("It does not answer.")
        self.before_it_answers()
        return ShownRequest(state="ready", detail="It can be restarted.")

    def begin(self, request: LaunchRequest, _seen: ShownRequest) -> None:
        self.begun.append(request.action_id)


class Absence:
    """A request to a launcher that does not answer, and the thread that carries it out."""

    def __init__(self, database: Database) -> None:
        self.database, self.launcher, self.now_ns = database, AbsentLauncher(), START_NS
        with database.write() as session:
            session.add(toy_job("job-1", state="recovering", watched=True))
            session.flush()
            request(session, "act-0", AbsentLauncher.name, START_NS)
        backends = {AbsentLauncher.name: self.launcher}
        self.thread = LaunchThread(
            database, CommitSignals(), "me", 10**12, backends, lambda: self.now_ns
        )

    def run_pass(self) -> None:
        self.now_ns += 10_000_000_000
        self.thread.run_pass()

    def withdraw(self) -> bool:
        with self.database.write() as session:
            return launches.withdraw(session, "act-0", self.now_ns)


@pytest.fixture
def absence(database: Database) -> Absence:
    return Absence(database)


def test_a_request_is_withdrawn_while_the_launcher_does_not_answer(absence: Absence) -> None:
    absence.run_pass()
    assert absence.withdraw()
    absence.launcher.answers = True
    absence.run_pass()
    assert absence.launcher.begun == []


def test_a_request_that_has_begun_is_not_withdrawn(absence: Absence) -> None:
    absence.launcher.answers = True
    absence.run_pass()
    assert absence.launcher.begun == ["act-0"]
    assert not absence.withdraw()
    absence.launcher.answers = False
    absence.run_pass()
    assert not absence.withdraw(), "it does not answer, and may carry the request out"


def test_a_request_that_is_withdrawn_while_it_is_observed_does_not_begin(absence: Absence) -> None:
    absence.launcher.answers = True
    withdrawals: list[bool] = []
    absence.launcher.before_it_answers = lambda: withdrawals.append(absence.withdraw())
    absence.run_pass()
    assert withdrawals == [True]
    absence.run_pass()
    assert absence.launcher.begun == []


@pytest.mark.parametrize("answered_before", [False, True])
def test_a_job_that_finished_by_itself_is_not_restarted_once_its_launcher_answers(
    absence: Absence, answered_before: bool
) -> None:
    absence.launcher.answers = answered_before
    absence.run_pass()
    begun = list(absence.launcher.begun)
    with absence.database.write() as session:
        session.execute(update(ActionRow).values(state="superseded"))
    absence.launcher.answers = True
    absence.run_pass()
    assert absence.launcher.begun == begun, "it shows that nothing was done, and nothing is"
    assert results(absence.database)["act-0"].state == "failed"


def test_a_request_does_not_wait_until_a_clock_that_was_set_back_has_caught_up(
    absence: Absence,
) -> None:
    absence.run_pass()
    absence.launcher.answers = True
    absence.now_ns -= 3600 * 10**9
    absence.run_pass()
    assert absence.launcher.begun == ["act-0"]
