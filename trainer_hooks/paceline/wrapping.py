"""Replace methods of classes that the script has loaded, so that errors of Paceline stay here.

A replacement stays for the life of the process and does nothing without a session: other threads
may be inside it at any time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from paceline.session import log_once
from paceline.torch_events import subclasses

_MARK = "_paceline"  # on a replacement: the keys of all that was added to the original


def loaded(module: str, name: str) -> Any | None:
    """Return an attribute of a module if the script has loaded it."""
    return getattr(sys.modules.get(module), name, None)


def replace(
    owner: Any,
    name: str,
    make: Callable[[Any], Any],
    by: Callable[..., Any] | None = None,
) -> None:
    """Replace a function of a class or module by `make(function)`, once per process.

    A class without such a function, as other versions of a framework may have, stays as it is.

    Args:
        owner: the class or module.
        name: of the function.
        make: returns the replacement.
        by: the function that the replacement adds, whose name says what was added; default `make`.
    """
    by = by or make
    key = (by.__module__, by.__qualname__)
    original = vars(owner).get(name)
    done = getattr(original, _MARK, ())
    if original is None or key in done:
        return
    replacement = wraps(original)(make(original))
    setattr(replacement, _MARK, (*done, key))
    setattr(owner, name, replacement)


def replace_everywhere(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a module, also where other modules have imported it from there."""
    original = vars(module).get(name)
    if original is None:
        return
    replace(module, name, make)
    replacement = vars(module)[name]
    if replacement is original:
        return
    # Subclasses may load modules when their contents are read.
    for other in [each for each in list(sys.modules.values()) if type(each) is ModuleType]:
        for known, value in list(vars(other).items()):
            if value is original:
                setattr(other, known, replacement)


def after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Call `call(result, *args)` after each call of a method; an error of it is logged once."""

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                call(result, *args)
            except Exception as error:
                log_once(f"after {name}", "paceline: nothing recognized in %s: %s", name, error)
            return result

        return replacement

    replace(owner, name, make, by=call)


def instances(*classes: Any) -> Iterator[Any]:
    """Yield the existing instances of these classes and their subclasses."""
    kinds = [kind for each in classes if each is not None for kind in (each, *subclasses(each))]
    if kinds:
        for found in gc.get_referrers(*kinds):
            if type(found) in kinds:
                yield found
