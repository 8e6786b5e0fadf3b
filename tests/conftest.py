"""Order of the test files: the longest ones start first. No garbage collection of collected tests.
No test of Hypothesis depends on wall time.

`make unit` gives whole files to parallel processes. A long file that starts last would run alone
while the other processes are idle.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from paceline_wire.local_token import STATE_DIRECTORY

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# By wall time, longest first. Names, not paths, so that a moved file keeps its position.
LONGEST = (
    "test_readme_commands",
    "test_autostart",
    "test_external_jobs",
    "test_takeover",
    "test_job_page",
    "test_alerts",
    "test_process",
    "test_demo",
    "test_preload",
    "test_api",
    "test_background_process",
    "test_clock_jumps",
    "test_streams",
    "test_forward",
    "test_starved_server",
    "test_life_of_a_job",
    "test_parallel_proof",
    "test_database_away",
    "test_program",
)


@pytest.fixture(scope="session", autouse=True)
def _tokens_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let servers and clients find each other's tokens here, not in the user's own files."""
    os.environ[STATE_DIRECTORY] = str(tmp_path_factory.mktemp("state"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the objects of 5,000 tests, neither now nor later.

    The hooks search all objects when they begin: 40 ms in a training, more than a second here.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
