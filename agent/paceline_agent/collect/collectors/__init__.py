"""Collectors: one file each. Being in this folder registers a collector."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from paceline_agent.collect.contract import Collector


def discover() -> list[type[Collector]]:
    """Return every collector of this folder, sorted by name.

    Raises ValueError if two collectors share a name.
    """
    found: dict[str, type[Collector]] = {}
    for module_info in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        module = importlib.import_module(module_info.name)
        for candidate in vars(module).values():
            if not _is_collector_of(candidate, module.__name__):
                continue
            if candidate.name in found:
                raise ValueError(f"two collectors are named {candidate.name!r}")
            found[candidate.name] = candidate
    return [found[name] for name in sorted(found)]


def _is_collector_of(candidate: object, module_name: str) -> bool:
    return (
        isinstance(candidate, type)
        and issubclass(candidate, Collector)
        and candidate.__module__ == module_name
        and not inspect.isabstract(candidate)
    )
