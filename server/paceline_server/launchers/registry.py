"""The registry of launchers: it finds the modules beside this file that have a `LAUNCHER`."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from paceline_server import launchers
from paceline_server.engine.types import Launch
from paceline_server.launchers.contract import Launcher, LauncherParts


@cache
def launcher_classes() -> dict[str, type[Launcher]]:
    """Return the backend of each launcher by its name."""
    modules = (
        import_module(module.name)
        for module in pkgutil.iter_modules(launchers.__path__, prefix=f"{launchers.__name__}.")
        if module.name != __name__
    )
    backends = (getattr(module, "LAUNCHER", None) for module in modules)
    return {backend.name: backend for backend in backends if backend is not None}


def create_launchers(parts: LauncherParts) -> dict[str, Launcher]:
    """Return a server's backends by name."""
    return {name: backend.create(parts) for name, backend in launcher_classes().items()}


def recognize(metadata: Mapping[str, Mapping[str, str]]) -> Launch | None:
    """Return the launch of ranks by what they report (`Launcher.recognize`)."""
    found = (backend.recognize(metadata) for backend in launcher_classes().values())
    return next((launch for launch in found if launch is not None), None)
