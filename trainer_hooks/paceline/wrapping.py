"""Replace methods of classes that the script has loaded, so that errors of Paceline stay here.

A replacement stays for the life of the process and does nothing without a session: other threads
may be inside it at any time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from paceline.session import log_once

_MARK = "_paceline_replaced"


def loaded(module: str, name: str) -> Any | None:
    """Return an attribute of a module if the script has loaded it."""
    return getattr(sys.modules.get(module), name, None)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a class or module by `make(function)`, once per process."""
    original = vars(owner).get(name)
    if original is None or hasattr(original, _MARK):
        return
    replacement = wraps(original)(make(original))
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement)


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

    replace(owner, name, make)


def instances(*classes: Any) -> Iterator[Any]:
    """Yield the existing instances of these classes and their subclasses."""
    kinds = [kind for each in classes if each is not None for kind in _with_subclasses(each)]
    if kinds:
        for found in gc.get_referrers(*kinds):
            if type(found) in kinds:
                yield found


def _with_subclasses(kind: Any) -> Iterator[Any]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
