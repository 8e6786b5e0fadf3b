"""TorchElastic: reports how ranks of a torchrun job ended, from torchrun's own process.

    PACELINE=1 torchrun train.py

torchrun notices the first ranks that fail, then ends the others. Its events have the exit statuses
only when the job is over, and not for restarts. So the adapter takes them when torchrun begins to
end the others, and hands them to the agent: with the traceback that `@record` wrote, unless the
rank's hooks reported one themselves. The exit code 0 of a rank is handed over while torchrun still
waits for the others: after `os._exit(0)` its hooks saw no end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from paceline.environment import read_rank_environment
from paceline.integrations.boundaries import never_raises
from paceline.wrapping import replace
from paceline_wire.ending import Ending, write_ending


def attach(module: ModuleType) -> None:
    """Report the failures of the processes that torchrun starts.

    Args:
        module: `torch.distributed.elastic.multiprocessing.api`.
    """
    replace(module.PContext, "close", _reporting)
    replace(module.PContext, "wait", _reporting_finished)


def _reporting(close_all: Callable[..., Any]) -> Callable[..., Any]:
    def close(self: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(self, "_paceline_closed"):
            # Later those that torchrun ended have failed too.
            self._paceline_closed = True
            report_failures(getattr(self, "_failures", {}), getattr(self, "envs", {}))
            report_finished(self)
        return close_all(self, *args, **options)

    return close


def _reporting_finished(wait_for_all: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **options: Any) -> Any:
        result = wait_for_all(self, *args, **options)
        if not hasattr(self, "_paceline_closed"):
            report_finished(self)
        return result

    return wait


@never_raises
def report_failures(failures: dict[int, Any], environments: dict[int, dict[str, str]]) -> None:
    """Write how these ranks ended.

    Args:
        failures: torch's `ProcessFailure`s by local rank.
        environments: variables of each local rank.
    """
    for local_rank, failure in failures.items():
        _write(environments[local_rank], ending_of(failure))


@never_raises
def report_finished(context: Any) -> None:
    """Write the exit code of the ranks that have ended with 0, each once.

    Args:
        context: torch's `SubprocessContext`; others have no exit codes here.
    """
    finished = {
        local_rank
        for local_rank, handler in getattr(context, "subprocess_handlers", {}).items()
        if handler.proc.returncode == 0
    }
    reported: set[int] = getattr(context, "_paceline_finished", set())
    context._paceline_finished = reported | finished
    for local_rank in finished - reported:
        _write(context.envs[local_rank], Ending(0))


def _write(environment: dict[str, str], ending: Ending) -> None:
    rank = read_rank_environment({**os.environ, **environment})
    if rank is not None and rank.ring_path.exists():
        write_ending(rank.ring_path, ending)


def ending_of(failure: Any) -> Ending:
    """Return how a rank ended from torch's `ProcessFailure`."""
    status = failure.exitcode
    message = failure.error_file_data.get("message")
    details = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    error = str(details.get("py_callstack", ""))
    return Ending(None, -status, error) if status < 0 else Ending(status, None, error)
