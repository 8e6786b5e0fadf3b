"""The trainer of the foreign arm, with the two lines of Paceline that a user may add."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import paceline
import paceline_evaluation

TRAINERS = Path(paceline_evaluation.__file__).parent / "foreign/trainers"


def add_lines(loader: Iterable[Any], mesh: Any) -> Iterable[Any]:
    paceline.init(mesh=mesh)
    return paceline.steps(loader)


if __name__ == "__main__":
    sys.path.insert(0, str(TRAINERS))
    importlib.import_module("train").main(add_lines)
