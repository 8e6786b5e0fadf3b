"""Cursors of lists."""

from __future__ import annotations

import base64

import pytest

from paceline_server.api.dependencies import Bounds
from paceline_server.api.paging import urgency_cursor, urgency_position


@pytest.mark.parametrize("urgency", [5.0, -1.0, -0.8986, 0.0, 0.00004, 1e-16])
def test_each_urgency_is_a_position(urgency: float) -> None:
    cursor = urgency_cursor(urgency, 7, "inc-1")
    bounds = Bounds(100, _decoded(cursor))
    assert urgency_position(bounds) == (urgency, 7, "inc-1")


def _decoded(cursor: str) -> str:
    return base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
