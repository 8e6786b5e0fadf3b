"""Windows of time in a policy: weekly ones, and single ones between two dates. Pure.

    Sat 22:00-06:00 Europe/Berlin      Mon-Fri 02:00-04:00      daily 02:00-04:00 UTC
    2026-12-01T22:00/2026-12-02T04:00 Europe/Berlin

A weekly window that ends before it begins ends on the next day. Without a time zone it is UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY = timedelta(days=1)
_WEEKLY = re.compile(
    r"(?P<days>[A-Za-z+-]+) +(?P<begin>[0-9:]+)-(?P<end>[0-9:]+)(?: +(?P<zone>\S+))?"
)
_SINGLE = re.compile(r"(?P<begin>[^\s/]+T[^\s/]+)/(?P<end>[^\s/]+)(?: +(?P<zone>\S+))?")
EXPECTED = (
    "DAYS HH:MM-HH:MM [ZONE], such as `Sat 22:00-06:00 Europe/Berlin`, with DAYS like Sat, "
    "Sat+Sun, Mon-Fri or daily; or BEGIN/END [ZONE], such as `2026-12-01T22:00/2026-12-02T04:00`"
)


class WindowError(ValueError):
    """A text that is not a window; the message says what is wrong with it."""


class _Weekly(NamedTuple):
    days: frozenset[int]  # 0: Monday
    begin: timedelta  # since midnight
    end: timedelta  # more than a day if it ends on the next one
    zone: tzinfo

    def contains(self, at: datetime) -> bool:
        local = at.astimezone(self.zone).replace(tzinfo=None)
        midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
        return any(
            day.weekday() in self.days and day + self.begin <= local < day + self.end
            for day in (midnight, midnight - _DAY)
        )


class _Single(NamedTuple):
    begin: datetime
    end: datetime

    def contains(self, at: datetime) -> bool:
        return self.begin <= at < self.end


def check_window(text: str) -> None:
    """Raise WindowError if the text is not a window."""
    _window(text)


def active_window(windows: Iterable[str], now_ns: int) -> str | None:
    """Return the first window that contains the time; None if there is none.

    `now_ns`: CLOCK_REALTIME. Raises WindowError.
    """
    for text in windows:
        window = _window(text)
        # datetime has microseconds; nanoseconds do not matter for windows of minutes
        at = datetime.fromtimestamp(now_ns // 1_000_000_000, ZoneInfo("UTC"))
        if window.contains(at):
            return text
    return None


@lru_cache(maxsize=256)
def _window(text: str) -> _Weekly | _Single:
    if found := _SINGLE.fullmatch(text.strip()):
        zone = _zone(found["zone"])
        begin, end = _date(found["begin"], zone), _date(found["end"], zone)
        if end <= begin:
            raise WindowError(f"it ends at {found['end']}, before it begins at {found['begin']}")
        return _Single(begin, end)
    if (found := _WEEKLY.fullmatch(text.strip())) is None:
        raise WindowError(f"expected {EXPECTED}")
    begin_time, end_time = _time(found["begin"]), _time(found["end"])
    if begin_time == end_time:
        raise WindowError("it is empty: use 00:00-24:00 for a whole day")
    if end_time < begin_time:
        end_time += _DAY
    return _Weekly(_days(found["days"]), begin_time, end_time, _zone(found["zone"]))


def _days(text: str) -> frozenset[int]:
    if text.lower() == "daily":
        return frozenset(range(7))
    found = set[int]()
    for part in text.split("+"):
        first, separator, last = part.partition("-")
        begin, end = _day(first), _day(last if separator else first)
        found.update(day % 7 for day in range(begin, end + 1 if end >= begin else end + 8))
    return frozenset(found)


def _day(name: str) -> int:
    if name.capitalize() not in _DAYS:
        raise WindowError(f"{name!r} is not a day: expected one of {', '.join(_DAYS)} or daily")
    return _DAYS.index(name.capitalize())


def _time(text: str) -> timedelta:
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text)
    hours, minutes = (int(found[1]), int(found[2])) if found else (99, 0)
    if minutes > 59 or timedelta(hours=hours, minutes=minutes) > _DAY:
        raise WindowError(f"{text!r} is not a time: expected HH:MM from 00:00 to 24:00")
    return timedelta(hours=hours, minutes=minutes)


def _date(text: str, zone: tzinfo) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise WindowError(
            f"{text!r} is not a date with a time: expected one like 2026-12-01T22:00"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=zone)


def _zone(name: str | None) -> tzinfo:
    try:
        return ZoneInfo(name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise WindowError(
            f"{name!r} is not a time zone of this machine: expected a name like Europe/Berlin, or "
            "UTC; `pip install tzdata` adds all zones"
        ) from error
