"""Other users of the machine cannot read the database."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline_server.store.database import Database


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


def test_a_new_database_and_its_log_belong_to_its_user_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        database = Database(f"sqlite:///{tmp_path}/paceline.db")
        database.migrate()
        found = modes(tmp_path)
        database.close()
    finally:
        os.umask(previous)
    assert "paceline.db-wal" in found
    assert set(found.values()) == {0o600}


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o640), (0o660, 0o660), (0o666, 0o660)])
def test_other_users_lose_access_to_an_existing_one_and_its_group_keeps_it(
    tmp_path: Path, before: int, after: int
) -> None:
    path = tmp_path / "paceline.db"
    path.touch()
    path.chmod(before)
    Database(f"sqlite:///{path}").close()
    assert path.stat().st_mode & 0o777 == after
