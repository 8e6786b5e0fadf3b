"""The ranks of the current generation, brought up to date from events and progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline_server.decide.types import RankView
from paceline_server.engine.types import RankProgress
from paceline_server.store.models import Rank
from paceline_wire.batch import Event, RankAttached, RankExited, RankStarted

_ORDER = ("assigned", "started", "attached", "exited")
_SHOWN = ("pid", "state", "exit_code", "signal", "commanded", "step", "status", "process_state")
SEEN = (*_SHOWN, "operation", "operation_seconds")  # what changes within a generation
COLUMNS = tuple(column.key for column in Rank.__table__.columns)


class Ranks:
    """Owned by one worker between its commits. A rank's state never goes backwards."""

    def __init__(
        self, generation: int, rows: Iterable[Rank], said: Mapping[int, int] | None = None
    ) -> None:
        """`said`: as in `Placement`."""
        self.generation = generation
        self._said = said or {}
        self._rows = {row.rank: _copy(row) for row in rows}
        self._committed = {rank: dict(row) for rank, row in self._rows.items()}
        self.agents = {row["agent_id"] for row in self._rows.values()}
        self._views = {rank: _view(row) for rank, row in self._rows.items()}
        # Heard of since `views` and `committed`: of thousands of ranks most are as they were.
        self._unseen: set[int] = set()
        self._uncommitted: set[int] = set()
        self._advanced = False  # one of them, since `committed`

    def __len__(self) -> int:
        return len(self._rows)

    def views(self) -> list[RankView]:
        for rank in self._unseen:
            self._views[rank] = _view(self._rows[rank])
        self._unseen.clear()
        return list(self._views.values())

    def hear(self, agent_id: str, event: Event) -> None:
        """Events of other generations, agents or ranks change nothing."""
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
                    process_state=None,
                )

    def _advance(
        self, agent_id: str, generation: int, rank: int, state: str, **values: object
    ) -> None:
        row = self._rows.get(rank)
        said = self._said.get(rank, self.generation)
        if row is None or generation != said or row["agent_id"] != agent_id:
            return
        if _ORDER.index(state) > _ORDER.index(row["state"]):
            row.update(values, state=state)
            self._advanced = True
            self._touch(rank)

    def _touch(self, rank: int) -> None:
        self._unseen.add(rank)
        self._uncommitted.add(rank)

    def progress(self, news: Iterable[RankProgress]) -> None:
        """Of those ranks of which there is any."""
        for each in news:
            row = self._rows.get(each.rank)
            if row is not None:
                row["step"] = row["step"] if each.step is None else each.step
                row["status"] = _text(each.status, 32)
                row["operation"] = _text(each.operation, 200)
                row["operation_seconds"] = each.operation_seconds
                if row["state"] != "exited":
                    row["process_state"] = _text(each.process_state, 8)
                self._touch(each.rank)

    def changed(self) -> list[dict[str, Any]]:
        """Rows that differ from what is stored."""
        return [
            self._rows[rank]
            for rank in sorted(self._uncommitted)
            if self._rows[rank] != self._committed[rank]
        ]

    def changed_visibly(self) -> bool:
        """More than how long an operation has been running."""
        return any(
            self._rows[rank][name] != self._committed[rank][name]
            for rank in self._uncommitted
            for name in _SHOWN
        )

    def changed_life(self) -> bool:
        """More than how far they are, which their next news tell again."""
        return self._advanced

    def committed(self) -> None:
        for rank in self._uncommitted:
            self._committed[rank] = dict(self._rows[rank])
        self._uncommitted.clear()
        self._advanced = False


def _text(value: str | None, length: int) -> str | None:
    """As a column can hold it: agents may say anything."""
    return None if value is None else value.replace("\0", "")[:length]


_VIEWED = RankView.__struct_fields__


def _view(row: dict[str, Any]) -> RankView:
    return RankView(**{name: row[name] for name in _VIEWED})


def _copy(row: Rank) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS}


def placed(job_id: str, generation: int, views: Iterable[RankView]) -> list[Rank]:
    """Rows of a new generation."""
    rows = []
    for view in views:
        fields = {name: getattr(view, name) for name in RankView.__struct_fields__}
        rows.append(
            Rank(
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
