"""Ranks whose groups are those of DeepSpeed; the script does not know Paceline.

The variable LAYOUT: `pipeline 2 model 2` (a grid of pipeline, data and model axes), `sequence 2`
(Ulysses), `experts 2` (a mixture of experts) or `tensor 2` (automatic tensor parallelism).
"""

import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups
from transformers import LlamaConfig, LlamaForCausalLM

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
elif "sequence" in sizes:
    size = sizes["sequence"]
    config |= {"sequence_parallel_size": size}
    config |= {"data_parallel_size": dist.get_world_size() // size}
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8)
if "experts" in sizes:

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = MoE(8, layer, 2, sizes["experts"], min_capacity=0)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.experts(batch)[0]

    layer = Mixture()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer)
if "tensor" in sizes:
    config |= {"tensor_parallel": {"autotp_size": sizes["tensor"]}}
    shape = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, **more
)
for _ in range(4):
    torch.manual_seed(0)
    if "tensor" in sizes:
        loss = engine(input_ids=torch.arange(16).view(2, 8)).logits.sum()
    else:
        loss = engine(torch.randn(2, 8)).sum()
    engine.backward(loss)
    engine.step()
assert more.get("mpu") in (None, groups.mpu)
dist.barrier()
os._exit(0)  # threads of its groups may abort when the interpreter ends
