"""Windows of time in a policy."""

from __future__ import annotations

from datetime import datetime

import pytest

from paceline_server.policy_windows import WindowError, active_window, check_window


def ns(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ("Sat 02:00-06:00", "2026-11-28T02:00Z", "2026-11-28T06:00Z"),
        ("sat 02:00-06:00 UTC", "2026-11-28T05:59Z", "2026-11-27T03:00Z"),
        ("Sat 22:00-06:00", "2026-11-29T05:59Z", "2026-11-28T05:59Z"),  # into Sunday
        ("Mon-Fri 02:00-04:00", "2026-11-27T03:00Z", "2026-11-28T03:00Z"),
        ("Sat-Mon 02:00-04:00", "2026-11-30T03:00Z", "2026-12-01T03:00Z"),
        ("Sat+Wed 02:00-04:00", "2026-11-25T03:00Z", "2026-11-26T03:00Z"),
        ("daily 00:00-24:00", "2026-11-25T23:59Z", None),
        ("Sat 02:00-06:00 Europe/Berlin", "2026-11-28T01:30Z", "2026-11-28T05:30Z"),
        ("Sun 02:00-06:00 Europe/Berlin", "2026-07-05T00:30Z", "2026-07-05T04:30Z"),  # summer time
        ("2026-12-01T22:00/2026-12-02T04:00", "2026-12-02T03:59Z", "2026-12-02T04:00Z"),
        ("2026-12-01T22:00+02:00/2026-12-02T04:00Z", "2026-12-01T20:00Z", "2026-12-01T19:59Z"),
    ],
)
def test_a_window_contains_its_begin_and_not_its_end(
    window: str, inside: str, outside: str | None
) -> None:
    assert active_window([window], ns(inside)) == window
    if outside is not None:
        assert active_window([window], ns(outside)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected DAYS HH:MM-HH:MM"),
        ("Saturday night", "expected DAYS HH:MM-HH:MM"),
        ("Xyz 02:00-04:00", "'Xyz' is not a day: expected one of Mon, Tue"),
        ("Sat 2-4", "'2' is not a time: expected HH:MM"),
        ("Sat 02:00-25:00", "'25:00' is not a time"),
        ("Sat 02:60-03:00", "'02:60' is not a time"),
        ("Sat 02:00-02:00", "use 00:00-24:00 for a whole day"),
        ("Sat 02:00-04:00 Mars/Base", "'Mars/Base' is not a time zone"),
        ("Sat 02:00-04:00 ../../etc", "is not a time zone"),
        ("2026-12-02T04:00/2026-12-01T22:00", "before it begins"),
        ("2026-13-01T04:00/2026-12-01T22:00", "is not a date with a time"),
    ],
)
def test_what_is_no_window_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(WindowError) as caught:
        check_window(text)
    assert message in str(caught.value)
