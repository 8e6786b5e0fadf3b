"""A server of many agents asks them to send less often, never so seldom that they seem lost."""

from __future__ import annotations

from paceline_server.api.routes.agents import flush_seconds
from paceline_server.policy import Policy

AGENT_SECONDS = 0.5  # how often an agent sends by itself


def test_few_agents_send_as_often_as_they_like() -> None:
    assert flush_seconds(1) < AGENT_SECONDS
    assert flush_seconds(256) <= AGENT_SECONDS


def test_many_agents_together_send_no_more_than_a_server_takes() -> None:
    assert 512 / flush_seconds(512) <= 512
    assert flush_seconds(1280) == 2.5


def test_no_agent_is_asked_to_be_silent_for_a_lease() -> None:
    assert flush_seconds(10**6) <= Policy().node_lease_seconds / 2
