"""The entry point that `import torch` calls: starts the hooks if `PACELINE=1` asks for it.

PyTorch calls each entry point of the group `torch.backends` at the end of its own import. It is a
package of its own because every process that imports torch pays for it: without `PACELINE` it reads
one variable. With it, three functions of torch start the hooks as `paceline.init()` does:

    init_process_group        before it waits for the other ranks, if the launcher's variables
                              identify this one; else once the process group exists
    the first optimizer step  of a process that has none, or in a thread other than the one that
                              created the process group, unless a backward pass makes it
    `autograd.backward`       of a process that has neither after its 64th call, as one of Keras

The adapters of frameworks (`frameworks.py`) also do, when their training begins. So only processes
that train are recorded. torchrun, data loader workers and workers of torch.compile import torch
too, but do none of them. If an error ends a rank of torchrun earlier, that is reported.

An exception here would fail `import torch`. The name `paceline` is imported only at the start: a
script that has imported it by then is expected to call `paceline.init` itself. If it did not, it is
started at its first optimizer step, or before that in `init_process_group`.
"""

from __future__ import annotations

import logging
import os
import sys
from _thread import get_ident
from collections.abc import Callable
from functools import wraps
from typing import Any

from paceline_autostart.exits import before_exit, before_interrupt
from paceline_autostart.variable import OFF, ON, asked

_WORLD_SIZE = 3  # position among the arguments of `init_process_group`
_BACKWARDS = 64  # as many microbatches may come before the first optimizer step

_started_in = 0  # pid: a process is started once, and so is a forked child
_started_by = 0  # thread
_stepped_in = 0  # pid


def load() -> None:
    """Prepare the start of the hooks if `PACELINE` asks for it; the entry point.

    A script may have called `paceline.init` before it imported torch.
    """
    value, hooks = asked(), sys.modules.get("paceline.hooks")
    try:
        if hooks is not None:
            hooks.torch_is_loaded()
        if value in OFF:
            return
        if value in ON:
            _prepare(sys.modules["torch"])
        else:
            _warn("PACELINE must be 1 or 0, got %r: nothing is recorded", value)
    except Exception as error:
        _warn("nothing is recorded: %s", error)


def _prepare(torch: Any) -> None:
    from paceline_autostart import frameworks, result  # noqa: PLC0415 - not without `PACELINE`

    frameworks.watch()
    result.show_at_exit(lambda: _started_in == os.getpid())
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank of torchrun, or a process that it started
        before_exit(_report_early_error)
    before_interrupt(sys.modules["torch.multiprocessing.spawn"], _report_interrupt)
    optimizer = sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_pre_hook(_before_optimizer_step)
    torch.autograd.backward = _counting(torch.autograd.backward)
    if torch.distributed.is_available():
        _replace(torch.distributed.init_process_group, frameworks.is_imported_by_script)


def _replace(original: Callable[..., Any], is_imported_by_script: Callable[[], bool]) -> None:
    """Replace `init_process_group` in each module that has it, also under `from ... import`."""

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        is_scripts = is_imported_by_script()
        joined = _join(kwargs.get("world_size", args[_WORLD_SIZE] if args[_WORLD_SIZE:] else -1))
        try:
            result = original(*args, **kwargs)
        finally:
            joined()
        if not is_scripts:
            _start()
        return result

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("init_process_group") is original:
            setattr(module, "init_process_group", init_process_group)  # noqa: B010 - untyped


def _join(world_size: object) -> Callable[[], None]:
    """Show that this rank waits for the others. Return what ends that."""
    try:
        from paceline.hooks import join_process_group, knows_rank  # noqa: PLC0415

        if not knows_rank(world_size if isinstance(world_size, int) else -1):
            return lambda: None
        _start()
        return join_process_group()
    except Exception as error:
        _warn("a wait for other ranks is not recorded: %s", error)
        return lambda: None


def _before_optimizer_step(*_: Any) -> None:
    # Torch iterates over its hooks here, so this one cannot remove itself.
    global _stepped_in
    if _stepped_in != os.getpid():
        _stepped_in = os.getpid()
        _start(in_optimizer_step=True)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `autograd.backward` that starts a process whose optimizer is not one of torch."""
    left = _BACKWARDS

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            _start()
        return original(*args, **kwargs)

    backward._torchdynamo_disable = True  # type: ignore[attr-defined]
    return backward


def _report_early_error() -> None:
    """Report an error that ends this rank before it was started. For the end of the process."""
    error = getattr(sys, "last_value", sys.exc_info()[1])
    if error is None or _started_in == os.getpid():
        return
    try:
        from paceline.integrations.torchelastic import report_error  # noqa: PLC0415

        report_error(error)
    except Exception as problem:
        _warn("the error is not reported: %s", problem)


def _report_interrupt(error: BaseException) -> None:
    """Report what interrupts this rank, if it was started."""
    if _started_in != os.getpid():
        return
    try:
        from paceline.hooks import fail  # noqa: PLC0415

        fail(error)
    except Exception as problem:
        _warn("the interrupt is not reported: %s", problem)


def _nothing(*_: Any) -> None:
    """Replace the hook in an optimizer that torch.compile compiles: it could not trace the start.

    A process whose only optimizer is compiled, and without a process group, is not recorded.
    """


_before_optimizer_step._torchdynamo_inline = _nothing  # type: ignore[attr-defined]


def _start(*, in_optimizer_step: bool = False) -> None:
    global _started_in, _started_by
    in_other_thread = in_optimizer_step and _started_by != get_ident()
    if _started_in == os.getpid() and not in_other_thread:
        return
    _started_in, _started_by = os.getpid(), get_ident()
    try:
        from paceline.hooks import autostart  # noqa: PLC0415

        autostart(in_optimizer_step=in_optimizer_step)
    except Exception as error:
        _warn("nothing is recorded: %s", error)


def _warn(message: str, *values: object) -> None:
    logging.getLogger(__name__).warning("paceline: " + message, *values)
