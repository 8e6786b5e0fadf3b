"""Distributions of recovery times, by the kind of incident, the launcher and the week."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta

from paceline_server.api import schemas
from paceline_server.decide.recovery import PARTS
from paceline_server.store.models import RecoveryRow

DAY_NS = 86_400_000_000_000
ROWS = 20_000  # most recoveries that are counted


def report(rows: Sequence[RecoveryRow], since_ns: int) -> schemas.RecoveryReport:
    """Return the distributions of these recoveries."""
    return schemas.RecoveryReport(
        since=datetime.fromtimestamp(since_ns / 1e9, UTC),
        is_complete=len(rows) < ROWS,
        groups=list(groups(rows)),
    )


def groups(rows: Iterable[RecoveryRow], *, by_week: bool = True) -> Iterator[schemas.RecoveryGroup]:
    """Yield one group for each kind and launcher, followed by those of its weeks."""
    found = defaultdict[tuple[str, str, date | None], list[RecoveryRow]](list)
    for row in rows:
        found[row.kind, row.launcher, None].append(row)
        if by_week:
            found[row.kind, row.launcher, _week(row.resumed_ns)].append(row)
    for kind, launcher, week in sorted(found, key=lambda key: (key[:2], key[2] or date.min)):
        members = found[kind, launcher, week]
        yield schemas.RecoveryGroup(
            kind=kind,
            launcher=launcher,
            week=week,
            count=len(members),
            parts={part: one for part in (*PARTS, "total") if (one := _quantiles(members, part))},
        )


def _quantiles(rows: Iterable[RecoveryRow], part: str) -> schemas.QuantilesModel | None:
    known = (getattr(row, f"{part}_seconds") for row in rows)
    values = sorted(value for value in known if value is not None)
    if not values:
        return None
    p50, p90, p99 = (nearest_rank(values, share) for share in (0.5, 0.9, 0.99))
    return schemas.QuantilesModel(
        count=len(values), p50_seconds=p50, p90_seconds=p90, p99_seconds=p99
    )


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _week(at_ns: int) -> date:
    day = datetime.fromtimestamp(at_ns // 1_000_000_000, UTC).date()
    return day - timedelta(days=day.weekday())
