"""Finds the detectors: every concrete `Detector` in a module of `detectors/`."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

from paceline_server.detect import detectors
from paceline_server.detect.detector import Detector


def detector_classes() -> list[type[Detector]]:
    """In the order in which they are asked."""
    found: list[type[Detector]] = []
    for module_info in pkgutil.iter_modules(detectors.__path__):
        module = import_module(f"{detectors.__name__}.{module_info.name}")
        found += [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Detector)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
        ]
    return sorted(found, key=lambda detector: (detector.order, detector.__name__))
