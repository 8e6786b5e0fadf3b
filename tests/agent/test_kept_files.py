"""Reading many files at once says of each what reading it alone does."""

from __future__ import annotations

import os
from pathlib import Path

from paceline_agent.kept_files import KeptFiles

CONTENTS = {
    "counter": b"18446744073709551615\n",
    "negative": b"-1\n",
    "none": b"N/A (no PMA)\n",
    "empty": b"",
    "long": b"1" * 33,
}


def test_numbers_of_many_files_are_those_of_each(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    paths = [*(str(tmp_path / name) for name in CONTENTS), str(tmp_path / "absent"), str(tmp_path)]
    one, many = KeptFiles(), KeptFiles()
    for _ in range(2):  # opened, then kept
        assert many.read_numbers(paths, 1) == [one.read_number(path, 1) for path in paths]
    assert many.read_numbers(paths, 1) == [2**64 - 1, -1, None, None, None, None, None]
    (tmp_path / "counter").write_bytes(b"7\n")
    os.unlink(tmp_path / "none")
    (tmp_path / "absent").write_bytes(b"8\n")
    assert many.read_numbers(paths, 1) == [7, -1, None, None, None, 8, None]
    one.close()
    many.close()
