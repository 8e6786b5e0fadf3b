"""Alerts over real HTTP: each notice is delivered at least once, in order, including the
resolution."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from paceline_server.act.announce import (
    ActionNotice,
    IncidentReceiver,
    announce,
    incident_alert,
    incident_alerts,
)
from paceline_server.alerts import outbox as outbox_module
from paceline_server.alerts import receivers
from paceline_server.alerts.chat import chat_text
from paceline_server.decide.types import ActionView, IncidentView
from paceline_server.detect.finding import Finding
from paceline_server.settings import Settings
from paceline_server.store.database import Database
from paceline_server.store.models import IncidentRow, OutboxRow
from paceline_server.worker.commit import write_incidents
from tests.server.rows import toy_job


@dataclass
class Listener:
    """Records posted requests; responds with the given statuses in order, then with 200."""

    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def listener() -> Iterator[Listener]:
    recorder = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = recorder.statuses.pop(0) if recorder.statuses else 200
            recorder.requests.append((self.path, dict(self.headers), body))
            self.send_response(status)
            for name, value in {"Content-Length": "0", **recorder.headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorder.port = httpd.server_port
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield recorder
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@contextmanager
def listening() -> Iterator[tuple[Callable[[], socket.socket], str]]:
    """Yield a function that accepts a connection without responding, and the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield lambda: server.accept()[0], f"http://127.0.0.1:{server.getsockname()[1]}"


def view(state: Any = "open", severity: str = "warning", **fields: Any) -> IncidentView:
    finding = Finding(
        kind="straggler",
        cause="thermal throttle",
        fingerprint="f",
        summary="Rank 2 is slow.",
        detected_ns=time.time_ns(),
        generation=1,
        rank=2,
        node="node-1",
        severity=severity,
    )
    opened = time.time_ns()
    return IncidentView(
        incident_id="inc-1", finding=finding, state=state, opened_ns=opened, **fields
    )


def announce_incident(
    database: Database, receiver: str, before: IncidentView | None, after: IncidentView
) -> None:
    alert = incident_alert("job-1", "toy", before, after)
    if alert is not None:
        with database.write() as session:
            announce(session, [receiver], alert, after.incident_id, time.time_ns())


def outbox(database: Database) -> list[OutboxRow]:
    with database.read() as session:
        return list(session.scalars(select(OutboxRow).order_by(OutboxRow.id)))


def test_webhook_receives_opened_and_resolved_in_order(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    database = run_server(
        allow_local_receivers=True, webhook_url=f"{listener.url}/hook"
    ).program.database
    opened = view()
    resolved = msgspec.structs.replace(opened, state="resolved", resolved_ns=time.time_ns())
    announce_incident(database, "webhook", None, opened)
    announce_incident(database, "webhook", opened, opened)  # nothing changed
    announce_incident(database, "webhook", opened, resolved)
    wait_for(lambda: len(listener.requests) == 2, "two posts")
    assert [(path, body["event"]) for path, _, body in listener.requests] == [
        ("/hook", "opened"),
        ("/hook", "resolved"),
    ]
    assert listener.requests[0][2]["incident"]["finding"]["rank"] == 2
    wait_for(lambda: all(row.finished_ns for row in outbox(database)), "both delivered")


def test_an_incident_that_opens_and_closes_in_one_tick_opens_and_resolves_at_receivers() -> None:
    over = view("resolved")
    alerts = list(incident_alerts("job-1", "toy", None, over))
    assert [(alert.event, alert.incident.state) for alert in alerts] == [
        ("opened", "open"),
        ("resolved", "resolved"),
    ]
    assert alerts[1].incident == over


def events(before: IncidentView | None, after: IncidentView) -> list[str]:
    return [alert.event for alert in incident_alerts("job-1", "toy", before, after)]


def test_information_alerts_nobody_until_it_becomes_a_warning() -> None:
    info, warning = view(severity="info"), view()
    assert events(None, info) == []
    assert events(info, view("resolved", severity="info")) == []
    assert events(None, view("resolved", severity="info")) == []
    assert events(info, warning) == ["opened"]
    assert events(warning, view("resolved")) == ["resolved"]


def test_an_incident_that_falls_below_the_minimum_severity_is_over_for_the_receiver() -> None:
    """Its later end would not reach the receiver, where it would stay open."""
    warning, info = view(), view(severity="info")
    (alert,) = incident_alerts("job-1", "toy", warning, info)
    assert (alert.event, alert.incident.state) == ("resolved", "resolved")
    assert alert.incident.finding.severity == "warning", "the alert that the receiver has"
    (pushed,) = [receivers.Alertmanager("", None, 60.0)._alert(alert, now_ns=10**9)]
    assert pushed["endsAt"].startswith("1970-01-01T00:00:01")
    assert events(info, view("resolved", severity="info")) == []
    assert events(info, warning) == ["opened"]


def test_delivery_is_retried_with_the_same_key(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    listener.statuses = [503]
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    opened = view()
    announce_incident(database, "webhook", None, opened)
    announce_incident(
        database, "webhook", opened, msgspec.structs.replace(opened, state="mitigating")
    )
    wait_for(lambda: len(listener.requests) == 3, "the repetition")
    keys = [headers["Idempotency-Key"] for _, headers, _ in listener.requests]
    assert keys[0] == keys[1] != keys[2]
    assert [body["event"] for _, _, body in listener.requests] == ["opened", "opened", "updated"]


@pytest.mark.any_database
def test_silent_receiver_does_not_delay_other_receivers(
    run_server: Callable[..., Any],
    listener: Listener,
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_TIMEOUT_SECONDS", 600.0)
    with listening() as (accept, url):
        database = run_server(
            allow_local_receivers=True, webhook_url=url, chat_webhook_url=listener.url
        ).program.database
        announce_incident(database, "webhook", None, view())
        with accept():
            announce_incident(database, "chat", None, view())
            wait_for(lambda: outbox(database)[1].finished_ns, "the delivery to the channel")
            assert [row.attempts for row in outbox(database)] == [0, 1]


@pytest.mark.any_database
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_readyz_names_the_receiver_whose_thread_died_or_hangs(
    run_server: Callable[..., Any],
    wait_for: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_TIMEOUT_SECONDS", 600.0)
    with listening() as (accept, url):
        server = run_server(allow_local_receivers=True, webhook_url=url, chat_webhook_url=url)

        def missing() -> list[str]:
            return server.client.get("/readyz").json()["missing"]

        assert missing() == []
        announce_incident(server.program.database, "webhook", None, view())
        with accept():
            monkeypatch.setattr(outbox_module, "_STALLED_SECONDS", 2.0)
            wait_for(lambda: missing() == ["outbox:webhook: stalled"], "readyz to report it")
        wait_for(lambda: missing() == [], "the recovery")
    monkeypatch.setattr(outbox_module, "_STALLED_SECONDS", 600.0)
    monkeypatch.setattr(outbox_module.AlertDelivery, "_run_pass", lambda *_: 1 / 0)
    wait_for(lambda: len(missing()) == 2, "the end of both")
    assert missing() == ["outbox:webhook: not running", "outbox:chat: not running"]


@pytest.mark.any_database
def test_retry_scheduled_by_a_clock_that_was_ahead_runs_now(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    server = run_server(allow_local_receivers=True, webhook_url=listener.url)
    alert = incident_alert("job-1", "toy", None, view())
    assert alert is not None
    with server.program.database.write() as session:
        announce(session, ["webhook"], alert, "inc-1", time.time_ns() + 86_400 * 1_000_000_000)
    wait_for(lambda: len(listener.requests) == 1, "the post")


@pytest.mark.any_database
def test_rejected_notice_does_not_block_the_next_one(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    listener.statuses = [400]
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    opened = view()
    announce_incident(database, "webhook", None, opened)
    announce_incident(
        database, "webhook", opened, msgspec.structs.replace(opened, state="resolved")
    )
    wait_for(lambda: len(listener.requests) == 2, "the second")
    wait_for(lambda: all(row.finished_ns for row in outbox(database)), "the end")
    assert outbox(database)[0].error == "receiver responded 400"


@pytest.mark.any_database
def test_a_notice_of_another_version_does_not_block_the_next_one(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    row = OutboxRow(receiver="webhook", subject="inc-0", event="opened", body="{}")
    row.created_ns = time.time_ns()  # an old one may be pruned first
    row.attempts = row.next_attempt_ns = 0
    with database.write() as session:
        session.add(row)
    announce_incident(database, "webhook", None, view())
    wait_for(lambda: len(listener.requests) == 1, "the second")
    wait_for(lambda: all(row.finished_ns for row in outbox(database)), "the end")
    assert "the notice is not valid" in str(outbox(database)[0].error)


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("status", "asked", "seconds"),
    [
        (429, "300", 300),
        (503, "date", 600),
        (503, "9" * 400, 600),
        (429, "soon", 1),
    ],
    ids=["seconds", "date", "too large", "malformed"],
)
def test_retry_after_of_the_receiver_is_respected(
    run_server: Callable[..., Any],
    listener: Listener,
    wait_for: Callable[..., Any],
    status: int,
    asked: str,
    seconds: int,
) -> None:
    if asked == "date":
        asked = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    listener.statuses = [status]
    listener.headers = {"Retry-After": asked}
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    began = time.time_ns()
    announce_incident(database, "webhook", None, view())
    wait_for(lambda: outbox(database)[0].attempts, "the first try")
    waits = (outbox(database)[0].next_attempt_ns - began) / 1e9
    assert seconds - 2 < waits < seconds + 60


@pytest.mark.any_database
@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("https://key@new.example/secret", "https://new.example/..."),
        ("/secret", "http://127.0.0.1/..."),
        (None, None),
    ],
)
def test_redirect_is_reported_and_not_retried(
    run_server: Callable[..., Any],
    listener: Listener,
    wait_for: Callable[..., Any],
    location: str | None,
    target: str | None,
) -> None:
    listener.statuses = [308]
    listener.headers = {} if location is None else {"Location": location}
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    announce_incident(database, "webhook", None, view())
    wait_for(lambda: outbox(database)[0].finished_ns, "the end")
    (row,) = outbox(database)
    more = "" if target is None else f", a redirect to {target}: configure that address"
    assert (row.attempts, row.error) == (1, f"receiver responded 308{more}")


@pytest.mark.any_database
def test_chat_receives_opened_and_resolved_incidents_as_text(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    settings = {"chat_webhook_url": listener.url, "external_url": "https://paceline.example/"}
    database = run_server(allow_local_receivers=True, **settings).program.database
    opened = view(severity="critical")
    mitigating = msgspec.structs.replace(opened, state="mitigating")
    announce_incident(database, "chat", None, opened)
    announce_incident(database, "chat", opened, mitigating)
    announce_incident(
        database, "chat", mitigating, msgspec.structs.replace(opened, state="resolved")
    )
    wait_for(lambda: all(row.finished_ns for row in outbox(database)), "the end")
    page = "https://paceline.example/jobs/job-1"
    assert [body for _, _, body in listener.requests] == [
        {
            "text": "CRITICAL toy (job-1): Rank 2 is slow.\nCause: thermal throttle.\n"
            f"Details: paceline incidents show inc-1\n{page}"
        },
        {"text": f"RESOLVED toy (job-1): Rank 2 is slow.\n{page}"},
    ]


def action(state: Any, kind: Any = "restart", job: str = "toy", **fields: Any) -> str:
    reason = "Without node-1,\n<!channel> it continues."
    view = ActionView(
        action_id="act-1",
        kind=kind,
        state=state,
        reason=reason,
        generation=1,
        created_ns=1,
        **fields,
    )
    return chat_text(ActionNotice(job_id="toy", job_name=job, action=view))


def test_chat_receives_proposed_done_and_failed_actions() -> None:
    sentence = "toy: restart. Without node-1, (!channel) it continues."
    assert action("proposed") == f"PROPOSED {sentence}\nTo approve: paceline actions approve act-1"
    assert action("done", resumed_step=120, lost_steps=3) == (
        f"DONE {sentence}\nResumed at step 120; 3 steps lost."
    )
    assert action("failed", "start", error="No node.") == (
        f"FAILED {sentence.replace('restart', 'start')}\nNo node."
    )
    assert [action("running"), action("done", "start"), action("done", "notify")] == 3 * [""]


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("@all @here user@host", "\uff20all \uff20here user\uff20host"),
        ("<!channel> <@U1|x>", "(!channel) (\uff20U1|x)"),
        ("[look](http://elsewhere.example)", "(look)(http://elsewhere.example)"),
        ("*bold* ~gone~ `code`", "\u2217bold\u2217 \u223cgone\u223c 'code'"),
        ("_it_ __init__", "\u02cdit\u02cd \u02cd\u02cdinit\u02cd\u02cd"),
        ("all_reduce of tp_4 at 2 & 3", "all_reduce of tp_4 at 2 & 3"),
    ],
)
def test_names_cause_no_mentions_and_no_markup(name: str, escaped: str) -> None:
    assert action("proposed", job=name).startswith(f"PROPOSED {escaped} (toy): restart.")


@pytest.mark.parametrize(
    ("host", "escaped"), [("hooks.slack.com", "R&amp;D"), ("chat.example", "R&D")]
)
def test_slack_text_has_html_entities(host: str, escaped: str) -> None:
    texts: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        texts.append(json.loads(request.content)["text"])
        return httpx.Response(200)

    alert = incident_alert("team@all", "R&D", None, view())
    assert alert is not None
    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        chat = receivers.Chat(f"https://{host}/hook", "https://paceline.example")
        chat.deliver(client, "key", alert, 0)
    assert texts[0].startswith(f"WARNING {escaped} (team\uff20all): Rank 2 is slow.")
    assert texts[0].endswith("\nhttps://paceline.example/jobs/team%40all")


@pytest.mark.any_database
def test_response_whose_body_never_ends_counts_as_delivered(
    run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    with listening() as (accept, url):
        database = run_server(allow_local_receivers=True, webhook_url=url).program.database
        announce_incident(database, "webhook", None, view())
        with accept() as receiver:
            receiver.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n")
            wait_for(lambda: outbox(database)[0].finished_ns, "it to count as delivered")
    assert outbox(database)[0].error is None


@pytest.mark.any_database
def test_alertmanager_alert_fires_changes_severity_and_resolves(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    settings = {"alertmanager_url": listener.url, "external_url": "https://paceline.example"}
    database = run_server(allow_local_receivers=True, **settings).program.database
    opened = view()
    worse = msgspec.structs.replace(
        opened, finding=msgspec.structs.replace(opened.finding, severity="critical")
    )
    resolved = msgspec.structs.replace(worse, state="resolved", resolved_ns=worse.opened_ns + 5)
    announce_incident(database, "alertmanager", None, opened)
    announce_incident(database, "alertmanager", opened, worse)
    announce_incident(database, "alertmanager", worse, resolved)
    wait_for(lambda: len(listener.requests) == 3, "three pushes")
    assert {path for path, _, _ in listener.requests} == {"/api/v2/alerts"}
    first, second, third = (body for _, _, body in listener.requests)
    assert first[0]["labels"] == {
        "alertname": "PacelineStraggler",
        "severity": "warning",
        "job_id": "job-1",
        "job_name": "toy",
        "incident": "inc-1",
    }
    assert first[0]["annotations"]["cause"] == "thermal throttle"
    assert first[0]["endsAt"] > first[0]["startsAt"]
    assert first[0]["generatorURL"] == "https://paceline.example/jobs/job-1"
    assert [alert["labels"]["severity"] for alert in second] == ["critical", "warning"]
    assert second[1]["endsAt"] < second[0]["endsAt"], "the old one ends"
    assert third[0]["endsAt"][:19] == third[0]["startsAt"][:19]


@pytest.mark.any_database
def test_firing_alert_is_pushed_repeatedly(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    server = run_server(
        allow_local_receivers=True, alertmanager_url=listener.url, alert_repeat_seconds=0.3
    )
    incident = view()
    row = IncidentRow(
        id="inc-1",
        job_id="job-1",
        kind="straggler",
        severity="warning",
        state="open",
        opened_ns=incident.opened_ns,
        view=incident,
    )
    with server.program.database.write() as session:
        session.add(toy_job("job-1"))
        session.flush()
        session.add(row)
    wait_for(lambda: len(listener.requests) >= 2, "two pushes")
    ends = [body[0]["endsAt"] for _, _, body in listener.requests]
    assert ends == sorted(set(ends))


@pytest.mark.any_database
def test_alerts_of_jobs_that_ended_long_ago_are_not_repeated(database: Database) -> None:
    """Nothing resolves the incident of a failed job, and new ones must not be beyond the limit."""
    now_ns = time.time_ns()
    ended_ns = {"running": None, "just failed": now_ns, "failed": now_ns - 90_000_000_000_000}
    with database.write() as session:
        session.add_all(toy_job(name, finished_ns=at_ns) for name, at_ns in ended_ns.items())
        session.flush()
        for name in ended_ns:
            incident = msgspec.structs.replace(view(severity="critical"), incident_id=name)
            session.add(
                IncidentRow(
                    id=name,
                    job_id=name,
                    kind="failure",
                    severity="critical",
                    state="open",
                    opened_ns=incident.opened_ns,
                    urgency=4.0 if name == "running" else -0.86,
                    view=incident,
                )
            )
    with database.read() as session:
        firing = outbox_module.firing_alerts(session, "warning", now_ns)
    assert [alert.job_id for alert in firing] == ["running", "just failed"]


def test_two_servers_deliver_each_notice_once(
    run_server: Callable[..., Any], listener: Listener, wait_for: Callable[..., Any]
) -> None:
    database = run_server(allow_local_receivers=True, webhook_url=listener.url).program.database
    run_server(allow_local_receivers=True, webhook_url=listener.url)
    state: IncidentView | None = None
    for number in range(6):
        new = view("open" if number % 2 else "mitigating")
        announce_incident(database, "webhook", state, new)
        state = new
    wait_for(lambda: all(row.finished_ns for row in outbox(database)), "all")
    keys = [headers["Idempotency-Key"] for _, headers, _ in listener.requests]
    assert len(keys) == len(set(keys)) == 6


@pytest.mark.any_database
def test_each_receiver_gets_what_reaches_its_minimum_severity(database: Database) -> None:
    hook, pager = IncidentReceiver("hook", "info"), IncidentReceiver("pager", "critical")
    history = [view(severity="info"), view(), view(severity="critical"), view("resolved")]
    history[3] = msgspec.structs.replace(history[2], state="resolved")
    with database.write() as session:
        session.add(toy_job("toy"))
        session.flush()
        before: list[IncidentView] = []
        for after in history:
            write_incidents(session, "toy", "toy", before, [after], [hook, pager], time.time_ns())
            before = [after]
    sent = [(row.receiver, row.event) for row in outbox(database)]
    assert [event for receiver, event in sent if receiver == "hook"] == [
        "opened",
        "updated",
        "updated",
        "resolved",
    ]
    assert [event for receiver, event in sent if receiver == "pager"] == ["opened", "resolved"]


def test_the_minimum_severity_of_a_receiver_is_a_setting() -> None:
    urls = dict.fromkeys(
        ("webhook_url", "chat_webhook_url", "alertmanager_url"), "https://example.org"
    )
    chosen = Settings(**urls, webhook_severity="info", alertmanager_severity="critical")
    minimums = {target.name: target.minimum_severity for target in receivers.receivers(chosen)}
    assert minimums == {"webhook": "info", "chat": "warning", "alertmanager": "critical"}


def test_a_chat_gets_an_update_that_is_worse_or_names_another_rank_and_no_other() -> None:
    def update_text(before: IncidentView, **changes: Any) -> str:
        finding = msgspec.structs.replace(before.finding, **changes)
        after = msgspec.structs.replace(before, finding=finding)
        return "".join(map(chat_text, incident_alerts("job-1", "toy", before, after)))

    assert update_text(view(), cause="power cap") == ""
    assert update_text(view(), severity="critical").startswith("CRITICAL toy (job-1)")
    assert update_text(view(), rank=3, summary="Rank 3 is slow.").startswith("WARNING toy")


@pytest.mark.parametrize(("lag", "says"), [(None, False), (9.0, False), (110.4, True)])
def test_a_message_says_that_the_analysis_is_behind(lag: float | None, says: bool) -> None:
    [alert] = incident_alerts("job-1", "toy", None, view(severity="critical"))
    text = chat_text(msgspec.structs.replace(alert, lag_seconds=lag))
    assert ("The analysis was 110 s behind: this may have changed." in text) == says


@pytest.mark.any_database
def test_receivers_get_how_far_the_analysis_was_behind(database: Database) -> None:
    with database.write() as session:
        session.add(toy_job("toy"))
        session.flush()
        hook = IncidentReceiver("hook")
        write_incidents(session, "toy", "toy", [], [view()], [hook], time.time_ns(), 42.0)
    [row] = outbox(database)
    assert json.loads(row.body)["lag_seconds"] == 42.0
