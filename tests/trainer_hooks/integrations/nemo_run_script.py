"""An experiment of NeMo-Run, in the shape of its "hello scripts" example, with our plug-in.

nemo_run_script.py SCRIPT
"""

from __future__ import annotations

import sys

import nemo_run as run

from paceline.integrations.nemo_run import PacelinePlugin

if __name__ == "__main__":
    executor = run.LocalExecutor(ntasks_per_node=2, launcher="torchrun")
    task = run.Script(path=sys.argv[1], args=sys.argv[2:], entrypoint="python")
    run.run(task, executor=executor, plugins=PacelinePlugin(), name="example")
