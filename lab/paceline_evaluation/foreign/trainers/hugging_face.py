"""A script of Hugging Face's Trainer: a small GPT-2 on random tokens.

torchrun --nproc-per-node 4 hugging_face.py --batch 8
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from orders import Orders
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

TOKENS = 48
orders = Orders()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens without end."""

    def __init__(self, rows_per_step: int) -> None:
        self.rows_per_step = rows_per_step
        self.reads = 0

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        if self.reads % self.rows_per_step == 0:
            orders.in_loader(self.reads // self.rows_per_step)
        chance = torch.Generator().manual_seed(index)
        row = torch.randint(0, 100, (TOKENS,), generator=chance)
        return {"input_ids": row, "labels": row}


class FaultyTrainer(Trainer):
    """Has the ordered faults between its forward and its backward."""

    def compute_loss(self, *values: Any, **named: Any) -> Any:
        loss = super().compute_loss(*values, **named)
        orders.in_step(self.state.global_step)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=160,
        vocab_size=100,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=given.batch,
            dataloader_num_workers=given.workers,
            max_steps=1_000_000,
            logging_steps=20,
            save_strategy="steps" if given.checkpoint_every else "no",
            save_steps=given.checkpoint_every or 500,
            save_total_limit=1,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = Tokens(given.batch)
        FaultyTrainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
