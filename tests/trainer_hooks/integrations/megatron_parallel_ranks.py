"""Eight ranks whose groups are those of Megatron-core's parallel state; it does not know Paceline.

megatron_parallel_ranks.py SIZES   (JSON: arguments of `initialize_model_parallel`)
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]

from megatron.core import parallel_state  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(
    create_gloo_process_groups=False, **json.loads(sys.argv[1])
)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # Megatron keeps its groups, whose threads may abort when the interpreter ends
