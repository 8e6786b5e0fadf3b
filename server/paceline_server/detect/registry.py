"""Find the detectors: every concrete `Detector` in a `detector.py` of a folder beside this file."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec

from paceline_server import detect
from paceline_server.detect.contract import Detector


def detector_classes() -> list[type[Detector]]:
    """In the order in which they are asked."""
    found: list[type[Detector]] = []
    for package in pkgutil.iter_modules(detect.__path__, prefix=f"{detect.__name__}."):
        name = f"{package.name}.detector"
        if not package.ispkg or find_spec(name) is None:
            continue
        module = import_module(name)
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Detector)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
        ]
    return sorted(found, key=lambda detector: (detector.order, detector.__name__))
