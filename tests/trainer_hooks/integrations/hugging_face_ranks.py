"""A script of Hugging Face's Trainer, after its example `run_clm.py`; it does not know Paceline."""

import sys

from transformers import Trainer, TrainingArguments  # isort: skip - nothing imports torch before

import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size):
        chance = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, 100, (size, 16), generator=chance)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train(output, max_steps, resume):
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=max_steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Tokens(80),
        eval_dataset=Tokens(8),
    )
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    train(sys.argv[1], 4, resume=False)
    train(sys.argv[1], 6, resume=True)
