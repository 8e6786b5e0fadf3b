"""Lets the tests here import `simulated_incident`; the recorded incident, unpacked."""

import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps of 16 ranks of which two were stopped on the host."""
    directory = tmp_path_factory.mktemp("recorded")
    with tarfile.open(Path(__file__).parent / "data" / "lock_gil_1st.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "lock_gil_1st"
