"""NeMo-Run: a plug-in that has the tasks of an experiment recorded.

    from paceline.integrations.nemo_run import PacelinePlugin

    run.run(task, executor=executor, plugins=PacelinePlugin())

It sets `PACELINE=1` in the executor's environment, and the job's name; the ranks then start their
hooks by themselves. It works with each executor: local, Docker, Slurm, Kubernetes and the clouds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_run.run.plugin import ExperimentPlugin


@dataclass(kw_only=True)
class PacelinePlugin(ExperimentPlugin):  # type: ignore[misc]
    """Sets the variables of Paceline for a task, unless the executor has them already.

    Attributes:
        job: name of the job; default: the experiment's id, which all ranks of a task share.
        ring_directory: of the node's agent, where it is not in its default place (containers).
    """

    job: str | None = None
    ring_directory: str | None = None

    def setup(self, task: Any, executor: Any) -> None:
        """Add the variables; NeMo-Run calls this before it submits the task."""
        variables = {"PACELINE": "1"}
        if job := self.job or self.experiment_id:
            variables["PACELINE_JOB"] = job
        if self.ring_directory is not None:
            variables["PACELINE_RING_DIRECTORY"] = self.ring_directory
        executor.env_vars = {**variables, **executor.env_vars}
