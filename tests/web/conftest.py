"""The built page in Debian's Chromium, on the real server with a prepared database.

Rank 2 throttles, and a restart without its node is proposed. No worker runs (`Story` writes its
rows), so that nothing changes unless a test requests it.
"""

from __future__ import annotations

import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy.orm import Session

from paceline_server.app import create_app
from paceline_server.decide.types import (
    ActionView,
    IncidentView,
    JobSpec,
    Phase,
    Restarted,
)
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.engine.types import Placement
from paceline_server.policy import Policy
from paceline_server.settings import Settings
from paceline_server.steps.types import Ledger, RankStep, StageBubble, StepSummary
from paceline_server.store import models
from paceline_server.store.changes import Kind, record_change
from paceline_server.store.database import Database
from paceline_server.store.shares import step_rows
from paceline_server.store.signals import CommitSignals
from paceline_server.store.tokens import create_link_code, open_session
from paceline_wire.batch import AgentHello, GpuInfo
from paceline_wire.topology import Topology
from tests.ports import free_port

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECOND = 1_000_000_000


class Site:
    """The API and the pages on their own port; they can be stopped and restarted."""

    def __init__(self, database_url: str) -> None:
        self._settings = Settings(database_url=database_url, role="api")
        self.port = free_port()  # also free after `stop`
        self.start()

    def login_path(self) -> str:
        with self.database.write() as session:
            return f"/login?code={create_link_code(session, 'local-operator', time.time_ns())}"

    def sign_in(self, page: Page) -> None:
        """Give the page a session, as if a login link was opened."""
        with self.database.write() as session:
            code = create_link_code(session, "local-operator", time.time_ns())
            kept, _, sent = (open_session(session, code, time.time_ns()) or "").partition(".")
        name = f"paceline_session_{self.port}"
        page.context.add_cookies([{"name": name, "value": kept, "url": self.url}])
        page.add_init_script(f"localStorage.setItem('paceline.session', '{sent}')")

    def start(self) -> None:
        self.app = app = create_app(self._settings)
        self.database: Database = app.state.program.database
        self.signals: CommitSignals = app.state.program.signals
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:  # its database has been migrated by then
            assert time.monotonic() < deadline
            assert self._thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> None:
        self.signals.close()
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def change(self) -> Iterator[Session]:
        """A transaction after which streams check for changes."""
        with self.database.write() as session:
            yield session
        self.signals.changes.notify()


@dataclass
class Story:
    """One job like the demo's, and the next changes that its worker would make."""

    site: Site
    topology: Topology = field(default_factory=lambda: Topology(2, 2, 2))
    job_id: str = "job-1a2b3c4d"
    slow_rank: int = 2
    incident_id: str = "inc-aaaa1111"
    action_id: str = "act-bbbb2222"
    slow_from: int = 100
    step: int = 119

    @property
    def url(self) -> str:
        return f"{self.site.url}/jobs/{self.job_id}"

    def node(self, rank: int) -> str:
        return f"node-{rank // 2}"

    def begin(
        self, mode: str = "approve", steps: int = 120, name: str = "gpt <b>stdlib</b>"
    ) -> None:
        self.step = steps - 1
        self.began_ns = time.time_ns() - (steps + 30) * SECOND // 2
        with self.site.change() as session:
            session.add(self._job(mode, name))
            session.flush()
            self._place(session)
            for number in range(steps):
                session.add_all(self._step_rows(number))
            session.add(self._incident())
            session.add(self._action(ActionView(**self._proposal())))
            session.add(self._start())

    def finish_step(self) -> None:
        """Insert the next step and announce it to streams."""
        self.step += 1
        with self.site.change() as session:
            session.add_all(self._step_rows(self.step))
            job = session.get_one(models.JobRow, self.job_id)
            job.step = job.highest_step = self.step
            self._tell(session, "step", f"{self.job_id}/{self.step}")
            self._tell(session, "job", self.job_id)

    def add_resolved_incidents(self, count: int) -> None:
        """Add resolved incidents that are newer than the open one."""
        with self.site.change() as session:
            for number in range(count):
                row = self._incident()
                row.id, row.state = f"inc-{number:08x}", "resolved"
                row.opened_ns = row.resolved_ns = row.opened_ns + SECOND
                row.view = msgspec.structs.replace(
                    row.view,
                    incident_id=row.id,
                    state="resolved",
                    opened_ns=row.opened_ns,
                    resolved_ns=row.opened_ns,
                    action_ids=[],
                )
                session.add(row)

    def repair(self) -> None:
        """Complete the approved restart: generation 2 runs, and the incident is resolved."""
        now_ns = time.time_ns()
        with self.site.change() as session:
            action = session.get_one(models.ActionRow, self.action_id)
            done = msgspec.structs.replace(
                action.view,
                state="done",
                finished_ns=now_ns,
                resumed_step=self.step + 1,
                lost_steps=0,
                phases=[
                    Phase("checkpoint", now_ns - 3 * SECOND, f"all ranks at step {self.step}"),
                    Phase("start", now_ns - 2 * SECOND, "generation 2 on 4 nodes"),
                    Phase("done", now_ns, "first step finished"),
                ],
            )
            action.view, action.state, action.restart_of = done, "done", 1
            incident = session.get_one(models.IncidentRow, self.incident_id)
            incident.view = msgspec.structs.replace(
                incident.view, state="resolved", resolved_ns=now_ns
            )
            incident.state, incident.resolved_ns = "resolved", now_ns
            session.get_one(models.JobRow, self.job_id).generation = 2
            self._tell(session, "action", self.action_id)
            self._tell(session, "incident", self.incident_id)
            self._tell(session, "job", self.job_id)

    def wait_for_checkpoint(self) -> None:
        """Have the action wait for the script's own next checkpoint."""
        with self.site.database.write() as session:
            action = session.get_one(models.ActionRow, self.action_id)
            action.state = "running"
            detail = "Waiting for the script's own next checkpoint, expected in 40 steps (20 s)."
            phases = [Phase("wait", time.time_ns(), detail)]
            action.view = msgspec.structs.replace(action.view, state="running", phases=phases)
            session.get_one(models.JobRow, self.job_id).checkpoint_step = 80
            self._tell(session, "action", self.action_id)
            self._tell(session, "job", self.job_id)

    def supersede_quietly(self) -> None:
        """End the action without a notification to streams."""
        with self.site.database.write() as session:
            action = session.get_one(models.ActionRow, self.action_id)
            action.state = "superseded"
            action.view = msgspec.structs.replace(action.view, state="superseded")

    def approve_another_quietly(self) -> None:
        """Add an approved restart without a notification to streams."""
        view = ActionView(
            action_id="act-cccc3333",
            kind="restart",
            state="approved",
            reason="Restart requested by another person.",
            generation=1,
            created_ns=time.time_ns(),
        )
        with self.site.database.write() as session:
            session.add(self._action(view))

    def action_state(self) -> str:
        with self.site.database.read() as session:
            return session.get_one(models.ActionRow, self.action_id).state

    def _tell(self, session: Session, kind: Kind, subject: str) -> None:
        session.flush()
        record_change(session, self.job_id, kind, subject)

    def _job(self, mode: str, name: str) -> models.JobRow:
        parts = {
            "compute_seconds": 30.0,
            "communication_seconds": 6.0,
            "bubble_seconds": 5.0,
            "straggler_seconds": 2.0,
            "imbalance_seconds": 0.5,
            "peer_wait_seconds": 0.5,
            "bubble_excess_seconds": 0.5,
            "data_wait_seconds": 1.0,
            "optimizer_seconds": 4.0,
            "evaluation_seconds": 1.0,
            "checkpoint_seconds": 2.0,
            "lost_seconds": 3.0,
            "restart_seconds": 9.0,
            "startup_seconds": 10.5,
            "idle_seconds": 0.0,
        }
        wall = sum(parts.values())
        return models.JobRow(
            id=self.job_id,
            name=name,
            spec=JobSpec(name="gpt", argv=["python"], topology=self.topology),
            policy=Policy(mode=mode),  # type: ignore[arg-type]
            state="running",
            generation=1,
            topology=self.topology,
            created_ns=self.began_ns,
            started_ns=self.began_ns + 6 * SECOND,
            stop_requested=False,
            cursor=0,
            step=self.step,
            highest_step=self.step,
            step_seconds=0.62,
            loss=2.413,
            evaluation_loss=2.61,
            ledger=Ledger(
                wall_seconds=wall, goodput_ratio=45 / wall, useful_steps=self.step, **parts
            ),
        )

    def _place(self, session: Session) -> None:
        ranks = range(self.topology.world_size)
        for rank in ranks:
            slow = rank == self.slow_rank
            session.add(
                models.RankRow(
                    job_id=self.job_id,
                    rank=rank,
                    generation=1,
                    agent_id=self.node(rank),
                    local_rank=rank % 2,
                    gpu=rank % 2,
                    pid=1000 + rank,
                    state="attached",
                    status="running",
                    step=self.step,
                    operation="forward 3" if slow else f"all_reduce tp#{118 + rank}",
                    operation_seconds=0.25,
                    process_state="S",
                    commanded=False,
                )
            )
        session.add(
            models.GenerationRow(
                job_id=self.job_id,
                generation=1,
                cursor=0,
                placement=Placement(
                    generation=1,
                    topology=self.topology,
                    nodes={rank: self.node(rank) for rank in ranks},
                    gpus={rank: rank % 2 for rank in ranks},
                    started_ns=self.began_ns,
                ),
                restarted=Restarted(1, self.began_ns, 0),
            )
        )
        nodes = (len(ranks) + 1) // 2
        for number in range(nodes + 1):
            session.add(self._node(number, spare=number == nodes))

    def _node(self, number: int, spare: bool) -> models.NodeRow:
        name = f"node-{number}"
        hot = not spare and name == self.node(self.slow_rank)
        readings = {
            gpu: models.GpuReading(
                time_ns=time.time_ns(),
                sm_clock_hertz=795e6 if hot and gpu == 0 else 1980e6,
                temperature_celsius=91.0 if hot and gpu == 0 else 61.0,
                power_watts=310.0 if hot and gpu == 0 else 640.0,
                utilization_ratio=0.97,
                throttle_reasons=["sw_thermal_slowdown"] if hot and gpu == 0 else [],
            )
            for gpu in range(2)
        }
        gpus = [GpuInfo(gpu, f"GPU-{number}-{gpu}", "NVIDIA H200", f"00:{gpu}") for gpu in range(2)]
        return models.NodeRow(
            agent_id=name,
            boot_id="boot",
            sequence=0,
            packed_ns=time.time_ns(),
            # the node stays ready for the duration of a test
            last_seen_ns=time.time_ns() + 600 * SECOND,
            hello=AgentHello(
                time_ns=time.time_ns(),
                hostname=name,
                version="0.1.0",
                address="127.0.0.1",
                rendezvous_port=1,
                slots=2,
                gpus=gpus,
            ),
            readings=readings,
            dropped_batches=0,
            job_id=None if spare else self.job_id,
        )

    def _step_rows(self, number: int) -> list[models.Base]:
        slow = number >= self.slow_from
        duration = 1.05 if slow else 0.5
        start_ns = self.began_ns + 6 * SECOND + number * SECOND // 2
        summary = StepSummary(
            generation=1,
            step=number,
            started_ns=start_ns,
            duration_seconds=duration,
            loss=1.9 + 3.6 * math.exp(-number / 60),
            ranks=[self._share(rank, duration, slow) for rank in range(self.topology.world_size)],
            bubbles=[StageBubble(stage, 0.13, 0.111) for stage in range(self.topology.pp)],
            slowest_rank=self.slow_rank,
        )
        return [table(**row) for table, row in step_rows(self.job_id, summary).items()]

    def _share(self, rank: int, duration: float, slow: bool) -> RankStep:
        slowdown = 2.5 if slow and rank == self.slow_rank else 1.0 + 0.004 * (rank % 7)
        return RankStep(
            rank=rank,
            step_seconds=duration,
            self_seconds=0.3 * slowdown,
            compute_seconds=0.3 * slowdown,
            communication_seconds=0.05,
            wait_seconds=0.02,
            bubble_seconds=0.06,
            data_wait_seconds=0.01,
            optimizer_seconds=0.03,
            checkpoint_seconds=0.0,
            gc_seconds=0.0,
            slowdown=slowdown,
        )

    def _incident(self) -> models.IncidentRow:
        now_ns = time.time_ns() - 8 * SECOND
        node = self.node(self.slow_rank)
        finding = Finding(
            kind="straggler",
            cause="thermal throttle",
            fingerprint=f"straggler:{self.slow_rank}",
            summary=f"Rank {self.slow_rank} ({node}) is 2.5x slower: thermal throttle of gpu 0.",
            detected_ns=now_ns,
            generation=1,
            rank=self.slow_rank,
            node=node,
            stage=0,
            onset_step=100,
            step=106,
            slowdown=2.5,
            cost_ratio=0.52,
            evidence=[
                Evidence(
                    "SM clock fell at step 100", "DCGM_FI_DEV_SM_CLOCK", 795.0, expected=1980.0
                ),
                Evidence("GPU is hot", "DCGM_FI_DEV_GPU_TEMP", 91.0, expected=61.0),
            ],
            counter_evidence=[Evidence("Host CPU pressure did not change")],
        )
        view = IncidentView(
            incident_id=self.incident_id,
            finding=finding,
            opened_ns=now_ns,
            action_ids=[self.action_id],
        )
        return models.IncidentRow(
            id=self.incident_id,
            job_id=self.job_id,
            kind="straggler",
            severity="warning",
            state="open",
            opened_ns=now_ns,
            view=view,
        )

    def _proposal(self) -> dict[str, object]:
        return {
            "action_id": self.action_id,
            "kind": "restart",
            "state": "proposed",
            "reason": "Checkpoint at one step, then restart without the node that throttles.",
            "generation": 1,
            "created_ns": time.time_ns() - 7 * SECOND,
            "incident_id": self.incident_id,
            "exclude_nodes": [self.node(self.slow_rank)],
        }

    def _start(self) -> models.ActionRow:
        return self._action(
            ActionView(
                action_id="act-00000000",
                kind="start",
                state="done",
                reason="The job was created.",
                generation=0,
                created_ns=self.began_ns,
                finished_ns=self.began_ns + 6 * SECOND,
                phases=[Phase("start", self.began_ns, "8 ranks on 4 nodes")],
            )
        )

    def _action(self, view: ActionView) -> models.ActionRow:
        return models.ActionRow(
            id=view.action_id,
            job_id=self.job_id,
            incident_id=view.incident_id,
            kind=view.kind,
            state=view.state,
            created_ns=view.created_ns,
            version=0,
            noticed=True,
            view=view,
        )


@dataclass
class Watch:
    """A page and its unexpected errors and requests. A test that expects one removes it."""

    page: Page
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    def attach(self, origin: str) -> None:
        def requested(url: str) -> None:
            if not url.startswith(f"{origin}/"):
                self.foreign.append(url)

        self.page.on("request", lambda request: requested(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self._record(message.type, message.text))
        self.page.on("response", lambda answer: self._answered(answer.status))

    def _record(self, kind: str, text: str) -> None:
        # Chromium's own line for each 4xx; `refused` has their numbers.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.errors.append(text)

    def _answered(self, status: int) -> None:
        if status >= 400:
            self.refused.append(status)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(f"sqlite:///{tmp_path / 'paceline.db'}")
    yield found
    found.stop()


@pytest.fixture
def story(site: Site) -> Story:
    return Story(site)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).is_file():
        pytest.skip(
            f"NO CHROMIUM AT {CHROMIUM}: THE DASHBOARD IS NOT TESTED (apt-get install chromium)"
        )
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=ARGUMENTS, timeout=120_000
        )
        yield browser
        browser.close()


Open = Callable[..., Watch]


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Open]:
    with opened(browser, site) as go:
        yield go


@contextmanager
def opened(browser: Browser, site: Site) -> Iterator[Open]:
    """Yield a function that opens an address of the site.

    At the end, no page may have unexpected errors or requests. The browser is signed in as by
    `paceline login`, unless it is not `signed_in`.
    """
    watches: list[Watch] = []

    def go(url: str, signed_in: bool = True, **options: object) -> Watch:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})  # type: ignore[arg-type]
        page.set_default_timeout(60_000)
        watch = Watch(page)
        watch.attach(site.url)
        watches.append(watch)
        if signed_in:
            site.sign_in(page)
        page.goto(url)
        return watch

    yield go
    for watch in watches:
        watch.page.close()
    for watch in watches:
        assert watch.foreign == []
        assert watch.errors == []
        assert watch.refused == []
