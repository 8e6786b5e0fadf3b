"""Lightning Fabric: a callback, in the entry-point group `lightning.fabric.callbacks_factory`.

    from paceline.integrations.fabric import FabricCallback

    fabric = Fabric(..., callbacks=[FabricCallback()])

With `PACELINE=1`, or after `paceline.init()`, each Fabric has it and needs no line. The loop is the
script's, and so are its evaluations. A step ends when an optimizer of `fabric.setup` has stepped.
Fabric counts no steps; the first number is the count of the optimizer, which a checkpoint restores.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from paceline.hooks import checkpoint_saved, given_step
from paceline.integrations.boundaries import (
    LeadingOptimizer,
    StepBoundaries,
    follow,
    save_or_load,
    surround,
)
from paceline.saves import completed_steps

PACKAGES = ("lightning.fabric", "lightning_fabric")  # with the same content
_boundaries = StepBoundaries()
_leading = LeadingOptimizer()
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


class FabricCallback:
    """A callback of Fabric that needs none of its hooks: it surrounds Fabric's own calls once.

    So a Fabric with two of them, of the entry point and of the script, still counts each step once.
    """

    def __init__(self) -> None:
        for name in PACKAGES:
            if (package := sys.modules.get(name)) is not None:
                _watch(package)


def callbacks() -> list[FabricCallback]:
    """Return the callback of a new Fabric; the entry point calls it."""
    return [FabricCallback()]


def _watch(package: Any) -> None:
    """Time the parts that no event marks."""
    wrappers = sys.modules[f"{package.__name__}.wrappers"]
    surround(wrappers._FabricModule, "forward", _forward)
    follow(wrappers._FabricOptimizer, "step", _stepped)
    surround(package.Fabric, "backward", _begin)
    surround(package.Fabric, "save", save_or_load)
    follow(package.Fabric, "save", _saved, arguments=("path",))
    surround(package.Fabric, "load", save_or_load)
    follow(package.Fabric, "setup", _remember)
    follow(package.Fabric, "setup_optimizers", _remember)


def _remember(fabric: Any, *arguments: Any) -> None:
    _optimizers.update(each for each in arguments if hasattr(each, "param_groups"))
    _leading.reset()


def _forward(module: Any, *_: Any) -> None:
    if module.training:
        _begin()


def _stepped(optimizer: Any, *_: Any) -> None:
    if _boundaries.are_marked and _leading.is_it(optimizer):
        _boundaries.next()


def _begin(*_: Any) -> None:
    if _boundaries.claim() and _boundaries.step is None:
        given = given_step()
        _boundaries.begin(completed_steps(_optimizers) if given is None else given)


def _saved(_: Any, path: Any) -> None:
    if _boundaries.are_marked and _boundaries.step is not None:
        checkpoint_saved(_boundaries.step, path)
