"""The registry of detectors: it finds the packages beside this file that have a `detector.py`."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec

from paceline_server import detect
from paceline_server.detect.contract import Detector


def detector_classes() -> list[type[Detector]]:
    """Return every concrete `Detector`, in the order in which they run."""
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
