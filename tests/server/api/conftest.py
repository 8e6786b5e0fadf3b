"""Lets the tests here import `simulated_job`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "simulation"))

from recorded_job import Recorded  # it imports from the parent folder


@pytest.fixture
def recorded(run_server: Callable[..., Any]) -> Recorded:
    return Recorded(run_server(role="api"))
