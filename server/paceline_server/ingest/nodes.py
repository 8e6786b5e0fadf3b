"""What a batch says about its node: alive, who it is, how its GPUs are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import lru_cache

from sqlalchemy import BindParameter, Connection, Table, bindparam, insert, select, update
from sqlalchemy.orm import Session

from paceline_server.store.changes import record_changes
from paceline_server.store.models import BootRow, GpuReading, NodeRow
from paceline_wire.batch import AgentHello, Batch, Sample

_GPU_SHOWN_NS = 1_000_000_000  # a node's readings are announced this often at most
_SILENT_NS = 5_000_000_000  # longer than any living agent's pause


@dataclass(slots=True)
class _Heard:
    """A node's row, but for who it is (`hello`), which only a new hello changes."""

    agent_id: str
    boot_id: str
    sequence: int
    packed_ns: int
    last_seen_ns: int
    readings: dict[int, GpuReading]
    dropped_batches: int
    hello: AgentHello | None = None


# Over the bare tables: of a thousand nodes mapped objects would cost more than all else here.
_NODES: Table = NodeRow.__table__  # type: ignore[assignment]  # is a Table
_BOOTS: Table = BootRow.__table__  # type: ignore[assignment]
_FIELDS = tuple(field.name for field in fields(_Heard) if field.name != "hello")
_AGENTS: BindParameter[str] = bindparam("agents", expanding=True)
_KNOWN_NODES = select(*(_NODES.c[name] for name in _FIELDS)).where(_NODES.c.agent_id.in_(_AGENTS))
_KNOWN_BOOTS = select(_BOOTS.c.agent_id, _BOOTS.c.boot_id).where(_BOOTS.c.agent_id.in_(_AGENTS))
_CHANGE = update(_NODES).where(_NODES.c.agent_id == bindparam("of_agent"))


def hear(session: Session, heard: Sequence[tuple[Batch, int]]) -> None:
    """Update the nodes' rows from batches that were new, given with when they were received.

    An old boot's batch changes nothing here, so a node's freshness never goes backwards.
    """
    connection = session.connection()
    asked = {"agents": sorted({batch.agent_id for batch, _ in heard})}
    stored = {row.agent_id: _Heard(*row) for row in connection.execute(_KNOWN_NODES, asked)}
    nodes = dict(stored)
    known = {tuple(row) for row in connection.execute(_KNOWN_BOOTS, asked)}
    boots = []
    announced = set()
    for batch, received_ns in heard:
        is_new_boot = (batch.agent_id, batch.boot_id) not in known
        if is_new_boot:
            known.add((batch.agent_id, batch.boot_id))
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
                batch.boot_id > node.boot_id or (is_new_boot and _began(node, batch, received_ns))
            ):
                continue
            node.boot_id, node.sequence = batch.boot_id, -1
        if _apply(node, batch, received_ns):
            announced.add(batch.agent_id)
    if boots:
        connection.execute(insert(_BOOTS), boots)
    _keep(connection, nodes, stored)
    record_changes(session, None, "node", sorted(announced))


def _keep(connection: Connection, nodes: dict[str, _Heard], stored: Collection[str]) -> None:
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


def _began(node: _Heard, batch: Batch, received_ns: int) -> bool:
    """Boots sort in order, but for a node that lost its disk and had its clock set back."""
    return batch.sequence == 0 and received_ns - node.last_seen_ns > _SILENT_NS


def _new(batch: Batch, received_ns: int) -> _Heard:
    return _Heard(
        agent_id=batch.agent_id,
        boot_id=batch.boot_id,
        sequence=-1,
        packed_ns=batch.packed_ns,
        last_seen_ns=received_ns,
        readings={},
        dropped_batches=0,
    )


def _apply(node: _Heard, batch: Batch, received_ns: int) -> bool:
    """Returns whether those who look at the node should hear of it."""
    returned = received_ns - node.last_seen_ns > _GPU_SHOWN_NS
    # What came at once is not always stored in order; by more, our clock was set back.
    if not 0 < node.last_seen_ns - received_ns < _SILENT_NS:
        node.last_seen_ns = received_ns
    if batch.sequence < node.sequence:
        return returned  # a straggling batch: alive, but its values are old
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


def _read_gpus(node: _Heard, samples: list[Sample]) -> bool:
    known = node.readings
    fresh: dict[int, GpuReading] = {}
    for sample in samples:
        name = sample.name
        if name not in _SHOWN and name != _THROTTLE:
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
    return node_changed or newest // _GPU_SHOWN_NS != oldest // _GPU_SHOWN_NS


@lru_cache(maxsize=1024)
def _gpu_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else None


_SHOWN = {
    # metric: field, factor to base units
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_hertz", 1e6),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature_celsius", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_watts", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization_ratio", 0.01),
}
_THROTTLE = "paceline_gpu_throttle_reason"


def _read(reading: GpuReading, sample: Sample) -> None:
    reading.time_ns = sample.time_ns
    if sample.name == _THROTTLE:
        reason = sample.labels.get("reason", "unknown")
        others = set(reading.throttle_reasons) - {reason}
        reading.throttle_reasons = sorted(others | {reason} if sample.value else others)[:32]
    else:
        name, factor = _SHOWN[sample.name]
        setattr(reading, name, sample.value * factor)
