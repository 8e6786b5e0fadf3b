"""Lets the tests here import `simulated_incident`; the recorded incident, unpacked."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of 16 ranks of which two were stopped on the host."""
    directory = tmp_path_factory.mktemp("recorded")
    archive = Path(__file__).parent / "data" / "lock_gil_1st.tar.gz"
    subprocess.run(["tar", "-xf", archive, "-C", directory], check=True)
    return directory / "lock_gil_1st"
