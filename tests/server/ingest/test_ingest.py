"""A batch is stored once before the response, or rejected with a 4xx and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_node import bearer, hello, post_job
from sqlalchemy import func, select

from paceline_server.api.routes import ingest as routes
from paceline_server.ingest.nodes import update_nodes
from paceline_server.store.database import Database
from paceline_server.store.models import HotLogRow, NodeRow
from paceline_server.store.tokens import create_token
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, RankStarted, Sample

PATIENT = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def headers(url: str) -> dict[str, str]:
    return {"Content-Type": wire.CONTENT_TYPE, **bearer(url, "agent")}


def batch(sequence: int = 0, boot: str = "boot-1", agent: str = "node-0", **fields: Any) -> Batch:
    values = {"packed_ns": time.time_ns(), **fields}
    return Batch(agent_id=agent, boot_id=boot, sequence=sequence, **values)


class Ingest:
    """Posts to a running server and reads its database."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.client = httpx.Client(
            base_url=server.url, headers=headers(server.url), timeout=60.0, verify=False
        )

    def post(self, content: bytes, **more: str) -> httpx.Response:
        answer = self.client.post("/api/v1/ingest", content=content, headers=more)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/problem+json", answer.text
            assert answer.json()["status"] == answer.status_code
        return answer

    def send(self, value: Batch) -> str:
        answer = self.post(wire.encode(value))
        assert answer.status_code == 200, answer.text
        assert answer.json()["sequence"] == value.sequence
        status: str = answer.json()["status"]
        return status

    def stored(self) -> int:
        with self.server.program.database.read() as session:
            return session.scalar(select(func.count()).select_from(HotLogRow)) or 0

    def node(self, agent_id: str = "node-0") -> NodeRow:
        with self.server.program.database.read() as session:
            return session.get_one(NodeRow, agent_id)

    def rejected(self, reason: str) -> float:
        registry = self.server.program.metrics.registry
        return (
            registry.get_sample_value("paceline_ingest_rejected_total", {"reason": reason}) or 0.0
        )


@pytest.fixture
def ingest(server: Any) -> Any:
    opened = Ingest(server)
    yield opened
    opened.client.close()


def test_repeated_batch_is_stored_once(ingest: Ingest) -> None:
    first = batch(events=[hello()])
    assert ingest.send(first) == "stored"
    assert ingest.send(first) == "duplicate"
    assert ingest.send(batch(boot="boot-2")) == "stored"
    assert ingest.stored() == 2


@pytest.mark.any_database
def test_api_server_without_worker_reports_the_lag(
    run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    def lag(server: Any) -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60.0).text.splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith("paceline_worker_lag_s")]
        return float(value)

    def send(sequence: int) -> None:
        content = wire.encode(batch(sequence))
        assert httpx.post(
            f"{server.url}/api/v1/ingest", content=content, headers=headers(server.url), timeout=60
        ).is_success

    server = run_server(role="api")
    send(0)
    assert lag(server) == 0.0, "no job: nobody is to read it"
    post_job(server.url)
    send(1)
    waited = lag(server)
    assert 0.0 < waited < lag(server)
    worker = run_server(role="all")
    wait_for(lambda: lag(worker) == 0.0, "the worker")


def test_concurrent_repeats_are_stored_once(ingest: Ingest) -> None:
    payload = wire.encode(batch())
    answers: list[str] = []

    def send() -> None:
        answer = httpx.post(
            f"{ingest.server.url}/api/v1/ingest",
            content=payload,
            headers=headers(ingest.server.url),
            timeout=60.0,
        )
        answers.append(answer.json()["status"])

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["duplicate"] * 7 + ["stored"]
    assert ingest.stored() == 1


def test_late_batch_does_not_revert_a_node(ingest: Ingest) -> None:
    ingest.send(batch(0, events=[hello()]))
    ingest.send(batch(5, dropped_batches=7))
    now = ingest.node()
    ingest.send(batch(3, dropped_batches=1))  # reordered
    ingest.send(batch(0, boot="boot-2", packed_ns=now.packed_ns + 1, events=[hello(slots=4)]))
    ingest.send(batch(6, dropped_batches=2))  # a batch of the previous boot
    node = ingest.node()
    assert node.boot_id == "boot-2"
    assert node.hello is not None
    assert (node.hello.slots, node.dropped_batches) == (4, 0)
    assert node.last_seen_ns >= now.last_seen_ns
    assert ingest.stored() == 5


def test_boot_that_overtakes_its_backlog_remains_current(ingest: Ingest) -> None:
    now_ns = time.time_ns()
    ingest.send(batch(0, boot="2", packed_ns=now_ns, events=[hello(slots=4)]))
    # an old batch that was not received before
    ingest.send(batch(0, boot="1", packed_ns=now_ns + 1, events=[hello(slots=2)]))
    ingest.send(batch(1, boot="1", packed_ns=now_ns + 2))
    ingest.send(batch(1, boot="2", packed_ns=now_ns - 1, dropped_batches=3))
    node = ingest.node()
    assert (node.boot_id, node.sequence, node.dropped_batches) == ("2", 1, 3)
    assert node.hello is not None
    assert node.hello.slots == 4
    assert ingest.stored() == 4


def test_node_with_lost_disk_and_clock_is_accepted_after_silence(ingest: Ingest) -> None:
    ingest.send(batch(0, boot="2", events=[hello()]))
    silent_ns = ingest.node().last_seen_ns + 6_000_000_000
    reborn = batch(0, boot="1", packed_ns=1, events=[hello(slots=4)])
    with ingest.server.program.database.write() as session:
        update_nodes(session, [(reborn, silent_ns)])
    assert ingest.node().boot_id == "1"
    ingest.send(batch(1, boot="1", packed_ns=2))
    assert ingest.node().sequence == 1


@pytest.mark.any_database
def test_last_seen_follows_batches_after_the_clock_was_set_back(
    database: Database,
) -> None:
    second_ns = 1_000_000_000

    def seen(sequence: int, received_ns: int) -> int | None:
        with database.write() as session:
            update_nodes(session, [(batch(sequence), received_ns)])
            return session.scalar(select(NodeRow.last_seen_ns))

    assert seen(0, 7200 * second_ns) == 7200 * second_ns
    assert seen(1, 7199 * second_ns) == 7200 * second_ns, "stored out of order"
    assert seen(2, 60 * second_ns) == 60 * second_ns, "set back by two hours"


@pytest.mark.any_database
def test_gpu_readings_of_a_node_are_in_base_units(ingest: Ingest) -> None:
    gpu = {"gpu": "0"}
    now = time.time_ns()
    values = [
        Sample("DCGM_FI_DEV_SM_CLOCK", gpu, 1980.0, now),
        Sample("DCGM_FI_DEV_GPU_UTIL", gpu, 50.0, now),
        Sample("paceline_gpu_throttle_reason", gpu | {"reason": "sw_thermal_slowdown"}, 1.0, now),
        # from an agent that sends false values
        Sample("DCGM_FI_DEV_SM_CLOCK", {"gpu": "x" * 99}, 1.0, now),
    ]
    ingest.send(batch(events=[hello()], samples=values))
    (node,) = ingest.server.client.get("/api/v1/nodes").json()["items"]
    (shown,) = node["gpus"]
    assert shown["sm_clock_hertz"] == 1.98e9
    assert shown["utilization_ratio"] == 0.5
    assert shown["throttle_reasons"] == ["sw_thermal_slowdown"]


BOMB = wire.pack_content(b"\0" * (wire.MAXIMUM_BYTES + 1))
UNDECLARED_BOMB = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(
    bytes(wire.MAXIMUM_BYTES + 1)
)
FUTURE = wire.pack_content(msgspec.msgpack.encode({"version": 99}))
HUGE = wire.pack_content(
    msgspec.msgpack.encode(msgspec.to_builtins(batch()) | {"sequence": 2**64 - 1})
)
LYING = wire.encode(
    batch(events=[RankStarted(time_ns=1, job="j", generation=0, rank=0, pid=1 << 40)])
)
REFUSED = [
    (b"", 400, "compression"),
    (b"not a batch", 400, "compression"),
    (wire.pack_content(b"\x81"), 400, "malformed"),
    (wire.encode(batch())[:-5], 400, "compression"),
    (FUTURE, 400, "version"),
    (BOMB, 413, "oversized"),
    (UNDECLARED_BOMB, 400, "compression"),
    (b"x" * (wire.MAXIMUM_COMPRESSED_BYTES + 1), 413, "oversized"),
    (HUGE, 400, "invalid"),
    (LYING, 400, "invalid"),
    (wire.encode(batch(agent="node\0")), 400, "invalid"),
    (wire.encode(batch(agent="")), 400, "invalid"),
]


@pytest.mark.any_database
def test_invalid_batch_is_rejected_and_counted(ingest: Ingest) -> None:
    for content, status, reason in REFUSED:
        before = ingest.rejected(reason)
        answer = ingest.post(content)
        assert answer.status_code == status, (reason, answer.text)
        assert ingest.rejected(reason) == before + 1
    answer = ingest.post(b"{}", **{"Content-Type": "application/json"})
    assert answer.status_code == 415
    assert ingest.stored() == 0
    assert ingest.send(batch()) == "stored"


@pytest.mark.any_database
def test_highly_compressed_batch_does_not_delay_other_requests(
    ingest: Ingest, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding: list[threading.Thread] = []
    monkeypatch.setattr(routes, "check", lambda _: decoding.append(threading.current_thread()))
    bomb = batch(1, samples=[Sample("m", {}, 0.0, 0)] * 70_000)
    assert len(wire.encode(bomb)) < 1000
    ingest.send(batch())
    ingest.send(bomb)
    usual, aside = decoding
    assert usual is not aside


@pytest.mark.any_database
def test_endless_body_is_rejected(ingest: Ingest) -> None:
    def endless() -> Any:
        for _ in range(1000):
            yield b"x" * 65536

    try:
        answer = ingest.client.post("/api/v1/ingest", content=endless())
        assert answer.status_code == 413
    except httpx.TransportError:
        pass  # the server closed the connection while bytes were being sent
    assert ingest.rejected("oversized") == 1


@pytest.mark.any_database
@PATIENT
@given(content=st.binary(max_size=200), position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_damaged_batches_never_break_the_server(
    ingest: Ingest, content: bytes, position: int, bit: int
) -> None:
    whole = bytearray(wire.encode(batch(events=[hello()], sequence=1)))
    whole[position % len(whole)] ^= 1 << bit
    for payload in (bytes(whole), content, wire.pack_content(content)):
        assert ingest.post(payload).status_code in (200, 400, 413)


@PATIENT
@given(order=st.permutations(range(4)), repeats=st.lists(st.integers(0, 3), max_size=4))
def test_batches_in_any_order_are_stored_once(
    ingest: Ingest, order: list[int], repeats: list[int]
) -> None:
    agent = f"node-{time.time_ns()}"
    before = ingest.stored()
    for sequence in [*order, *repeats]:
        ingest.send(batch(sequence, agent=agent))
    assert ingest.stored() == before + len(order)
    assert ingest.node(agent).sequence == 3


@pytest.mark.any_database
def test_ingest_requires_an_agent_token(ingest: Ingest) -> None:
    server = ingest.server
    tokens = {scope: make_token(server, scope) for scope in ("agent", "viewer", "operator")}
    payload = wire.encode(batch())
    statuses = {
        scope: ingest.post(payload, Authorization=f"Bearer {token}").status_code
        for scope, token in tokens.items()
    }
    assert statuses == {"agent": 200, "viewer": 403, "operator": 403}
    del ingest.client.headers["Authorization"]
    assert ingest.post(wire.encode(batch(9))).status_code == 401
    assert ingest.post(wire.encode(batch(9)), Authorization="Bearer x").status_code == 401
    assert ingest.stored() == 1


def make_token(server: Any, scope: Any) -> str:
    with server.program.database.write() as session:
        return create_token(session, f"a-{scope}", scope, time.time_ns())
