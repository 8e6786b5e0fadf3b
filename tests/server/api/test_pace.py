"""A server with many agents asks them to send less often, but often enough not to seem lost."""

from __future__ import annotations

from paceline_server.api.routes.agents import flush_seconds
from paceline_server.policy import Policy

AGENT_SECONDS = 0.5  # how often an agent sends by default


def test_few_agents_keep_their_own_flush_interval() -> None:
    assert flush_seconds(1) < AGENT_SECONDS
    assert flush_seconds(256) <= AGENT_SECONDS


def test_many_agents_share_the_capacity_of_the_server() -> None:
    assert 512 / flush_seconds(512) <= 512
    assert flush_seconds(1280) == 2.5


def test_flush_interval_stays_below_the_node_lease() -> None:
    assert flush_seconds(10**6) <= Policy().node_lease_seconds / 2
