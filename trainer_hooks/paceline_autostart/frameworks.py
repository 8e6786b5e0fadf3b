"""Attach an adapter of `paceline.integrations` once its framework has been imported.

Python asks the finders of `sys.meta_path` for each module that is not loaded yet. Ours knows a few
names; it lets the others find the module, and calls the adapter's `attach(module)` after the module
has run. Modules that were imported before are attached at once. One that imports torch, and so this
package, is not complete yet: it is attached when its import ends.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from paceline_autostart.variable import ON, asked

# The module that defines a framework's trainer or engine, and the adapter for it.
ADAPTERS = {
    "accelerate.accelerator": "paceline.integrations.accelerate",
    "composer.trainer.trainer": "paceline.integrations.composer",
    "deepspeed.runtime.engine": "paceline.integrations.deepspeed",
    "megatron.core.dist_checkpointing": "paceline.integrations.megatron",
    "megatron.core.optimizer.optimizer": "paceline.integrations.megatron",
    "megatron.core.pipeline_parallel.schedules": "paceline.integrations.megatron",
    "ray.train.v2._internal.execution.worker_group.thread_runner": (
        "paceline.integrations.ray_train"
    ),
    "torch.distributed.elastic.multiprocessing.api": "paceline.integrations.torchelastic",
    "torchtitan.components.checkpointer.dcp": "paceline.integrations.torchtitan",
    "torchtitan.observability.structured_logger.structured_logging": (
        "paceline.integrations.torchtitan"
    ),
    "torchtitan.trainer": "paceline.integrations.torchtitan",
    "transformers.trainer": "paceline.integrations.hugging_face",
}

_imported_by_adapters = False  # `paceline` was imported for a framework


def watch() -> None:
    """Attach the adapters of the frameworks that are imported by now, and of those to come."""
    loaded = ADAPTERS.keys() & sys.modules.keys()
    sys.meta_path.insert(0, FrameworkFinder({n: a for n, a in ADAPTERS.items() if n not in loaded}))
    for name in loaded:
        spec = sys.modules[name].__spec__
        if spec is not None and getattr(spec, "_initializing", False):
            spec.__class__ = UnfinishedSpec
        else:
            attach(ADAPTERS[name], sys.modules[name])


def is_imported_by_script() -> bool:
    """Return whether the script has imported `paceline` itself, and so is expected to start it."""
    return "paceline" in sys.modules and not _imported_by_adapters


def _import(adapter: str) -> Any:
    global _imported_by_adapters
    _imported_by_adapters = _imported_by_adapters or "paceline" not in sys.modules
    return importlib.import_module(adapter)


def attach(adapter: str, module: ModuleType) -> None:
    """Call an adapter; an error is logged and the framework stays as it is."""
    try:
        _import(adapter).attach(module)
    except Exception as error:
        logging.getLogger(__name__).warning(
            "paceline: %s is not used for %s: %s", adapter, module.__name__, error
        )


class UnfinishedSpec(ModuleSpec):
    """The spec of a module of ADAPTERS that is being imported; attaches when that has ended."""

    @property
    def _initializing(self) -> bool:
        return bool(vars(self)["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:  # by Python's import system
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if (module := sys.modules.get(self.name)) is not None:
                attach(ADAPTERS[self.name], module)


class FrameworkFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of ADAPTERS as the other finders do, with a loader that attaches."""

    def __init__(self, adapters: dict[str, str]) -> None:
        self._pending = adapters

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None for every other module."""
        # Removed before the search: the search asks this finder again.
        adapter = self._pending.pop(fullname, None)
        if adapter is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = AttachingLoader(spec.loader, adapter)
        return spec


class AttachingLoader(importlib.abc.Loader):
    """Runs a module with its own loader, then attaches the adapter."""

    def __init__(self, loader: Any, adapter: str) -> None:
        self._loader = loader
        self._adapter = adapter

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, which sees its own loader, and attach the adapter."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        attach(self._adapter, module)


def lightning_callbacks() -> list[Any]:
    """Return our callback for each new Trainer of Lightning; an entry point."""
    return _callbacks("paceline.integrations.lightning")


def fabric_callbacks() -> list[Any]:
    """Return our callback for each new Fabric; an entry point."""
    return _callbacks("paceline.integrations.fabric")


def _callbacks(adapter: str) -> list[Any]:
    try:
        if asked() in ON or "paceline" in sys.modules:
            callbacks: list[Any] = _import(adapter).callbacks()
            return callbacks
    except Exception as error:
        logging.getLogger(__name__).warning("paceline: %s is not used: %s", adapter, error)
    return []
