"""A training loop with Megatron-core on CPUs, in the shape of its `run_simple_mcore_train_loop.py`.

    megatron_ranks.py PIPELINE_SIZE DIRECTORY

Megatron-core creates its tensors on "cuda". Here they are created on the CPU; it is otherwise
unchanged. The loop trains for six steps of four microbatches, evaluates after the fourth and saves
after the last, to DIRECTORY. It does not know Paceline.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

STEPS, MICROBATCHES, SEQUENCE, BATCH = 6, 4, 16, 2


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU where "cuda" was asked for."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.timers import Timers  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


def build(pipeline_size: int) -> Any:
    config = TransformerConfig(
        num_layers=2 * pipeline_size,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=pipeline_size,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
        timers=Timers(log_level=2, log_option="max"),
        barrier_with_L1_time=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return DistributedDataParallel(config, ddp, model)


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = (output.float().view(-1) * mask.view(-1)).sum() / mask.sum()
    return loss, {"lm loss": loss.detach()}


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    time.sleep(0.005)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    return output, partial(loss_of, torch.ones(BATCH, SEQUENCE))


def prepare(pipeline_size: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return the model, its optimizer and the schedule, a function of `forward_only`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, pipeline_size)
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # type: ignore
    model = build(pipeline_size)
    optimizer = torch.optim.Adam(model.parameters())
    batches = iter(lambda: torch.randint(64, (BATCH, SEQUENCE)), None)
    run = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return model, optimizer, run


def train(model: Any, optimizer: torch.optim.Optimizer, run: Any) -> None:
    """Make one step."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    run(forward_only=False)
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()


def save(model: Any, output: Path) -> None:
    output.mkdir(exist_ok=True)
    dist_checkpointing.save(model.module.sharded_state_dict(), str(output))


def main() -> None:
    model, optimizer, run = prepare(int(sys.argv[1]))
    for step in range(STEPS):
        train(model, optimizer, run)
        if step == 3:
            with torch.no_grad():
                run(forward_only=True)
    save(model, Path(sys.argv[2]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with OnCpu():
        main()
