"""Updates of nodes from batches: last seen, hello, GPU readings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import lru_cache

from sqlalchemy import BindParameter, Connection, Table, bindparam, insert, select, update
from sqlalchemy.orm import Session

from paceline_server.store.changes import record_changes
from paceline_server.store.models import BootRow, GpuReading, NodeRow
from paceline_wire import metric_names
from paceline_wire.batch import AgentHello, Batch, Sample

_ANNOUNCE_NS = 1_000_000_000  # shortest interval between announcements of a node's readings
_SILENT_NS = 5_000_000_000  # longer than the pause of any live agent


@dataclass(slots=True)
class _NodeState:
    """The columns of a node's row that each batch updates; `hello` only if it sent one."""

    agent_id: str
    boot_id: str
    sequence: int
    packed_ns: int
    last_seen_ns: int
    readings: dict[int, GpuReading]
    dropped_batches: int
    hello: AgentHello | None = None


# Core tables: ORM objects of a thousand nodes would cost more than everything else here.
_NODES: Table = NodeRow.__table__  # type: ignore[assignment]  # is a Table
_BOOTS: Table = BootRow.__table__  # type: ignore[assignment]
_FIELDS = tuple(field.name for field in fields(_NodeState) if field.name != "hello")
_AGENTS: BindParameter[str] = bindparam("agents", expanding=True)
_KNOWN_NODES = select(*(_NODES.c[name] for name in _FIELDS)).where(_NODES.c.agent_id.in_(_AGENTS))
_KNOWN_BOOTS = select(_BOOTS.c.agent_id, _BOOTS.c.boot_id).where(_BOOTS.c.agent_id.in_(_AGENTS))
_CHANGE = update(_NODES).where(_NODES.c.agent_id == bindparam("of_agent"))


def update_nodes(session: Session, received: Sequence[tuple[Batch, int]]) -> None:
    """Update the rows of nodes from new batches, given as (batch, received_ns).

    Batches of an earlier boot are ignored, so that a node's state never goes backwards.
    """
    connection = session.connection()
    parameters = {"agents": sorted({batch.agent_id for batch, _ in received})}
    stored = {
        row.agent_id: _NodeState(*row) for row in connection.execute(_KNOWN_NODES, parameters)
    }
    nodes = dict(stored)
    known_boots = {tuple(row) for row in connection.execute(_KNOWN_BOOTS, parameters)}
    boots = []
    announced = set()
    for batch, received_ns in received:
        is_new_boot = (batch.agent_id, batch.boot_id) not in known_boots
        if is_new_boot:
            known_boots.add((batch.agent_id, batch.boot_id))
            boots.append(
                {
                    "agent_id": batch.agent_id,
                    "boot_id": batch.boot_id,
                    "first_seen_ns": received_ns,
                }
            )
        node = nodes.get(batch.agent_id)
        if node is None:
            node = nodes[batch.agent_id] = _new(batch, received_ns)
        elif node.boot_id != batch.boot_id:
            if not (
                batch.boot_id > node.boot_id
                or (is_new_boot and _is_first_batch_of_boot(node, batch, received_ns))
            ):
                continue
            node.boot_id, node.sequence = batch.boot_id, -1
        if _apply(node, batch, received_ns):
            announced.add(batch.agent_id)
    if boots:
        connection.execute(insert(_BOOTS), boots)
    _persist(connection, nodes, stored)
    record_changes(session, None, "node", sorted(announced))


def _persist(connection: Connection, nodes: dict[str, _NodeState], stored: Collection[str]) -> None:
    rows = {
        agent_id: {name: getattr(node, name) for name in _FIELDS}
        for agent_id, node in nodes.items()
    }
    if new := [row for agent_id, row in rows.items() if agent_id not in stored]:
        connection.execute(insert(_NODES), new)
    if known := [{"of_agent": agent_id, **rows[agent_id]} for agent_id in stored]:
        connection.execute(_CHANGE, known)
    hellos = [
        {"of_agent": agent_id, "hello": node.hello}
        for agent_id, node in nodes.items()
        if node.hello is not None
    ]
    if hellos:
        connection.execute(_CHANGE, hellos)


def _is_first_batch_of_boot(node: _NodeState, batch: Batch, received_ns: int) -> bool:
    """Return whether a boot id that sorts earlier is new because the node lost its disk and
    clock."""
    return batch.sequence == 0 and received_ns - node.last_seen_ns > _SILENT_NS


def _new(batch: Batch, received_ns: int) -> _NodeState:
    return _NodeState(
        agent_id=batch.agent_id,
        boot_id=batch.boot_id,
        sequence=-1,
        packed_ns=batch.packed_ns,
        last_seen_ns=received_ns,
        readings={},
        dropped_batches=0,
    )


def _apply(node: _NodeState, batch: Batch, received_ns: int) -> bool:
    """Apply a batch to its node; return whether to announce the node to streams."""
    returned = received_ns - node.last_seen_ns > _ANNOUNCE_NS
    # Concurrent batches may be stored out of order. A larger difference means that the clock was
    # set back.
    if not 0 < node.last_seen_ns - received_ns < _SILENT_NS:
        node.last_seen_ns = received_ns
    if batch.sequence < node.sequence:
        return returned  # a late batch: the node is alive, but the values are old
    node.sequence = batch.sequence
    node.packed_ns = batch.packed_ns
    node.dropped_batches = batch.dropped_batches
    hello = _newest_hello(batch)
    if hello is not None:
        node.hello = hello
    return _read_gpus(node, batch.samples) or hello is not None or returned


def _newest_hello(batch: Batch) -> AgentHello | None:
    hellos = [event for event in batch.events if isinstance(event, AgentHello)]
    return hellos[-1] if hellos else None


def _read_gpus(node: _NodeState, samples: list[Sample]) -> bool:
    known = node.readings
    fresh: dict[int, GpuReading] = {}
    for sample in samples:
        name = sample.name
        if name not in _READINGS and name != _THROTTLE_REASON:
            continue
        number = _gpu_number(sample.labels.get("gpu", ""))
        if number is None:
            continue
        reading = fresh.get(number)
        if reading is None:
            reading = fresh[number] = copy(known.get(number)) or GpuReading()
        if sample.time_ns >= reading.time_ns:
            _read(reading, sample)
    readings = {**known, **fresh}
    oldest = max((reading.time_ns for reading in known.values()), default=0)
    newest = max((reading.time_ns for reading in readings.values()), default=0)
    if newest == oldest:
        return False
    throttles = [reading.throttle_reasons for reading in known.values()]
    node_changed = throttles != [reading.throttle_reasons for reading in readings.values()]
    node.readings = readings
    return node_changed or newest // _ANNOUNCE_NS != oldest // _ANNOUNCE_NS


@lru_cache(maxsize=1024)
def _gpu_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else None


_READINGS = {
    # metric: field, factor to base units
    metric_names.SM_CLOCK: ("sm_clock_hertz", 1e6),
    metric_names.GPU_TEMP: ("temperature_celsius", 1.0),
    metric_names.GPU_POWER_USAGE: ("power_watts", 1.0),
    metric_names.GPU_UTIL: ("utilization_ratio", 0.01),
}
_THROTTLE_REASON = metric_names.GPU_THROTTLE_REASON


def _read(reading: GpuReading, sample: Sample) -> None:
    reading.time_ns = sample.time_ns
    if sample.name == _THROTTLE_REASON:
        reason = sample.labels.get("reason", "unknown")
        others = set(reading.throttle_reasons) - {reason}
        reading.throttle_reasons = sorted(others | {reason} if sample.value else others)[:32]
    else:
        name, factor = _READINGS[sample.name]
        setattr(reading, name, sample.value * factor)
