"""Ranks whose groups are those of DeepSpeed; the script does not know Paceline.

The variable LAYOUT: `pipeline 2 model 2` (a grid of pipeline, data and model axes) or `sequence 2`
(Ulysses).
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups

torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo")
words = os.environ["LAYOUT"].split()
sizes = dict(zip(words[::2], map(int, words[1::2]), strict=True))
config = {"train_micro_batch_size_per_gpu": 2}
more = {}
if "pipeline" in sizes:
    stages, slices = sizes["pipeline"], sizes.get("model", 1)
    replicas = dist.get_world_size() // (stages * slices)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=slices, num_dp=replicas)
    more["mpu"] = PipelineParallelGrid(topology=topology)
else:
    size = sizes["sequence"]
    config |= {"sequence_parallel_size": size}
    config |= {"data_parallel_size": dist.get_world_size() // size}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, **more
)
for _ in range(4):
    torch.manual_seed(0)
    engine.backward(engine(torch.randn(2, 8)).sum())
    engine.step()
assert more.get("mpu") in (None, groups.mpu)
dist.barrier()
os._exit(0)  # threads of its groups may abort when the interpreter ends
