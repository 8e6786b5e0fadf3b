"""A script of Hugging Face's Trainer that saves by itself and resumes, as its users write it.

It trains until it is ordered to end (`orders`), and then saves its last step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import orders
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

TOKENS = 16
ROWS = 512
CHECKPOINT_STEPS = 20


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 100, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Obedient(TrainerCallback):
    """Executes orders between steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        orders.before(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        orders.after(state.global_step)
        if orders.before(state.global_step):
            control.should_save = control.should_training_stop = True


def newest_whole_checkpoint(directory: Path) -> str | None:
    """Return the newest checkpoint that has all files: a crash may leave half of one."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    found = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in reversed(found):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        if all((path / f"rng_state_{rank}.pth").exists() for rank in ranks):
            return str(path)
    return None


def main() -> None:
    torch.set_num_threads(1)
    set_seed(1)
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=100,
        n_positions=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    directory = os.environ["PACELINE_CHECKPOINT_DIRECTORY"]
    arguments = TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=4,
        max_steps=1_000_000,
        lr_scheduler_type="constant",
        logging_steps=20,
        save_strategy="steps",
        save_steps=CHECKPOINT_STEPS,
        save_total_limit=3,
        ddp_find_unused_parameters=True,  # buckets stay as they are: sums have one order
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Sentences(),
        callbacks=[Obedient()],
    )
    trainer.train(resume_from_checkpoint=newest_whole_checkpoint(Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
