"""The rows of the current generation's ranks, updated by events and progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline_server.decide.types import RankView
from paceline_server.engine.types import RankProgress
from paceline_server.store.models import RankRow
from paceline_wire.batch import Event, RankAttached, RankExited, RankStarted

_ORDER = ("assigned", "started", "attached", "exited")
_VISIBLE = ("pid", "state", "exit_code", "signal", "commanded", "step", "status", "process_state")
# Those that change within a generation.
CHANGING_COLUMNS = (
    *_VISIBLE,
    "launcher_signal",
    "launcher_gone",
    "operation",
    "operation_seconds",
)
COLUMNS = tuple(column.key for column in RankRow.__table__.columns)


class RankRows:
    """The rank rows of one worker between its commits. A rank's state never goes backwards."""

    def __init__(
        self,
        generation: int,
        rows: Iterable[RankRow],
        reported_generations: Mapping[int, int] | None = None,
    ) -> None:
        """`reported_generations`: `Placement.reported_generations`."""
        self.generation = generation
        self._reported_generations = reported_generations or {}
        self._rows = {row.rank: _copy(row) for row in rows}
        self._committed = {rank: dict(row) for rank, row in self._rows.items()}
        self.agents = {row["agent_id"] for row in self._rows.values()}
        self._views = {rank: _view(row) for rank, row in self._rows.items()}
        # Only ranks changed since `views` and since `committed` are processed: most of thousands of
        # ranks have not changed.
        self._outdated_views: set[int] = set()
        self._uncommitted: set[int] = set()
        self._advanced = False  # a rank's state has changed since `committed`

    def __len__(self) -> int:
        return len(self._rows)

    def views(self) -> list[RankView]:
        for rank in self._outdated_views:
            self._views[rank] = _view(self._rows[rank])
        self._outdated_views.clear()
        return list(self._views.values())

    def apply(self, agent_id: str, event: Event) -> None:
        """Apply an event. Events of other generations, agents or ranks are ignored."""
        match event:
            case RankStarted(generation=generation, rank=rank, pid=pid):
                self._advance(agent_id, generation, rank, state="started", pid=pid)
            case RankAttached(identity=identity):
                self._advance(
                    agent_id,
                    identity.generation,
                    identity.rank,
                    state="attached",
                    pid=identity.pid,
                )
            case RankExited():
                self._advance(
                    agent_id,
                    event.generation,
                    event.rank,
                    state="exited",
                    pid=event.pid,
                    exit_code=event.exit_code,
                    signal=event.signal,
                    commanded=event.commanded,
                    launcher_signal=event.launcher_signal,
                    launcher_gone=event.launcher_gone,
                    process_state=None,
                )

    def _advance(
        self, agent_id: str, generation: int, rank: int, state: str, **values: object
    ) -> None:
        row = self._rows.get(rank)
        expected = self._reported_generations.get(rank, self.generation)
        if row is None or generation != expected or row["agent_id"] != agent_id:
            return
        if _ORDER.index(state) > _ORDER.index(row["state"]):
            row.update(values, state=state)
            self._advanced = True
            self._touch(rank)

    def _touch(self, rank: int) -> None:
        self._outdated_views.add(rank)
        self._uncommitted.add(rank)

    def update_progress(self, updates: Iterable[RankProgress]) -> None:
        for update in updates:
            row = self._rows.get(update.rank)
            if row is not None:
                row["step"] = row["step"] if update.step is None else update.step
                row["status"] = _text(update.status, 32)
                row["operation"] = _text(update.operation, 200)
                row["operation_seconds"] = update.operation_seconds
                if row["state"] != "exited":
                    row["process_state"] = _text(update.process_state, 8)
                self._touch(update.rank)

    def changed(self) -> list[dict[str, Any]]:
        """Return the rows that differ from the stored ones, by rank."""
        return [
            self._rows[rank]
            for rank in sorted(self._uncommitted)
            if self._rows[rank] != self._committed[rank]
        ]

    def changed_visibly(self) -> bool:
        """Return whether more has changed than how long an operation has been running."""
        return any(
            self._rows[rank][name] != self._committed[rank][name]
            for rank in self._uncommitted
            for name in _VISIBLE
        )

    def changed_state(self) -> bool:
        """Return whether a rank was started, attached or exited, which cannot wait like mere
        progress."""
        return self._advanced

    def committed(self) -> None:
        """Mark the current rows as stored."""
        for rank in self._uncommitted:
            self._committed[rank] = dict(self._rows[rank])
        self._uncommitted.clear()
        self._advanced = False


def _text(value: str | None, length: int) -> str | None:
    """Return the text in a form that fits the column, because agents may send anything."""
    return None if value is None else value.replace("\0", "")[:length]


_VIEWED = RankView.__struct_fields__


def _view(row: dict[str, Any]) -> RankView:
    return RankView(**{name: row[name] for name in _VIEWED})


def _copy(row: RankRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS}


def new_rank_rows(job_id: str, generation: int, views: Iterable[RankView]) -> list[RankRow]:
    """Return the rows of a new generation's ranks."""
    rows = []
    for view in views:
        fields = {name: getattr(view, name) for name in RankView.__struct_fields__}
        rows.append(
            RankRow(
                **fields,
                job_id=job_id,
                generation=generation,
                status=None,
                operation=None,
                operation_seconds=None,
                process_state=None,
            )
        )
    return rows
