"""Ray Train (v2): a callback of its worker groups.

    export RAY_TRAIN_CALLBACKS=paceline.integrations.ray_train.RayTrainWorkers

in the environment of the script that calls `trainer.fit()`. Each worker then records the thread
that runs the training function, with the job's name and the rank that Ray gives it. A new worker
group after a failure is the next generation of the job. Workers that inherit `PACELINE=1` need no
callback.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from ray import train
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from paceline.hooks import autostart, fail, finish
from paceline.integrations.boundaries import never_raises
from paceline.wrapping import replace

THREAD_RUNNER = "ray.train.v2._internal.execution.worker_group.thread_runner"


class RayTrainWorkers(WorkerGroupCallback):  # type: ignore[misc]
    """Has each worker of Ray Train recorded as a rank."""

    def __init__(self) -> None:
        self._generation = 0

    @never_raises
    def after_worker_group_start(self, worker_group: Any) -> None:
        """Prepare the new workers; Ray sets up torch's process group after this."""
        inherited = {name: text for name, text in os.environ.items() if name.startswith("PACELINE")}
        worker_group.execute(prepare_worker, inherited, self._generation)
        self._generation += 1


def prepare_worker(inherited: dict[str, str], generation: int) -> None:
    """Set this worker's variables and record its training function; it runs in the worker.

    Args:
        inherited: `PACELINE...` of the script, which a worker on another node does not have.
        generation: number of worker groups before this one.
    """
    context = train.get_context()
    variables = {
        "PACELINE_JOB": f"ray-{context.get_experiment_name()}",
        "PACELINE_GENERATION": str(generation),
        **inherited,
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    os.environ.update(variables)
    attach(importlib.import_module(THREAD_RUNNER))


def attach(module: ModuleType) -> None:
    """Record the training function, which Ray runs in a thread of its own.

    Args:
        module: `ray.train.v2._internal.execution.worker_group.thread_runner`.
    """
    replace(module.ThreadRunner, "run", _recording)


def _recording(run_in_thread: Callable[..., None]) -> Callable[..., None]:
    def run(self: Any, target: Callable[[], Any]) -> None:
        run_in_thread(self, _recorded(target))

    return run


def _recorded(target: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(target)
    def train_function() -> Any:
        never_raises(autostart)()
        try:
            return target()
        except Exception as error:
            never_raises(fail)(error)
            raise
        finally:
            never_raises(finish)()

    return train_function
