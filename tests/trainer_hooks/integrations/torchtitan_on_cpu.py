"""torchtitan's own `torchtitan.train`, unchanged, on CPUs: torch.cpu in the place of torch.cuda.

    torchtitan_on_cpu.py DIRECTORY [option of torchtitan]...

DIRECTORY gets what the wheel does not contain: a tokenizer of 256 bytes and a text to train on.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.attention.flex_attention
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule

ANSWERS = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda *_: None,
    "current_device": lambda: 0,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
}


def assets(directory: Path) -> None:
    """Write the tokenizer and the text."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    text = directory / "text"
    text.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"The {number}th sentence. " * 20}) for number in range(500)]
    (text / "train.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    here = Path(sys.argv.pop(1))
    assets(here)
    for name, answer in ANSWERS.items():
        setattr(torch.cpu, name, answer)
    # Gloo has sums only.
    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_the_sum(module: FSDPModule, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_the_sum  # type: ignore[method-assign]
    torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]  # newer torch
    # The dense backward of FlexAttention runs on CPUs; only its check does not allow it.
    torch.nn.attention.flex_attention._validate_device = lambda *_: None  # type: ignore[assignment]
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    sys.argv += ["--module", "llama3", "--config", "llama3_debugmodel"]
    sys.argv += ["--parallelism.spmd_backend", "full_dtensor", "--training.disable_cuda_graphs"]
    sys.argv += ["--hf_assets_path", str(here), "--dataloader.dataset_path", str(here / "text")]
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=False)
