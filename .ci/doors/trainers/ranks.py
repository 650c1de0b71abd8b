"""Runs a training step of each trainer: python ranks.py FOLDER, alone or by torchrun. The first process leaves the loss and the trained
weights of each in FOLDER."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trainer_context_parallel import SharedSequences, context
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from strobe.compat.transformers import register

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
COUNT = int(os.environ.get("WORLD_SIZE", "1"))
ARGUMENTS: dict[str, Any] = {
    "max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant",
    "average_tokens_across_devices": False, "report_to": [], "save_strategy": "no", "use_cpu": True, "max_grad_norm": 1.0,
    "disable_tqdm": True, "logging_steps": 1,
}  # fmt: skip


class SharedTrainer(SharedSequences, Trainer):
    pass


class SharedSFTTrainer(SharedSequences, SFTTrainer):
    pass


def model(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=implementation if COUNT > 1 else "eager")


def texts(*lengths: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=g).tolist() for n in lengths]


def trained(trainer: Any) -> tuple[float, Any]:
    """The logged loss is the mean over processes, that of train() this process's."""
    trainer.train()
    return trainer.state.log_history[0]["loss"], trainer.model


def with_trainer(folder: str, implementation: str = "sdpa") -> tuple[float, Any]:
    data = [{"input_ids": text, "labels": text} for text in texts(31, 31, 31, 31)]
    arguments = TrainingArguments(folder, **ARGUMENTS)
    return trained((SharedTrainer if COUNT > 1 else Trainer)(model(implementation), arguments, train_dataset=data))


def with_strobe(folder: str) -> tuple[float, Any]:
    register()
    return with_trainer(folder, "strobe")


def flattened(folder: str) -> tuple[float, Any]:
    """Sequences behind one another, with the lengths that a collator gives."""
    data = [{"input_ids": text} for text in texts(5, 17, 9, 12)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=COUNT > 1)
    arguments = TrainingArguments(folder, **ARGUMENTS | {"remove_unused_columns": False})
    return trained((SharedTrainer if COUNT > 1 else Trainer)(model(), arguments, train_dataset=data, data_collator=collator))


def with_lora(folder: str) -> tuple[float, Any]:
    adapted = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False))
    data = [{"input_ids": text, "labels": text} for text in texts(31, 31, 31, 31)]
    return trained((SharedTrainer if COUNT > 1 else Trainer)(adapted, TrainingArguments(folder, **ARGUMENTS), train_dataset=data))


def with_trl(folder: str) -> tuple[float, Any]:
    """TRL's supervised fine-tuning, texts packed into one row."""
    data = Dataset.from_list([{"input_ids": text} for text in texts(20, 24, 13, 30, 7, 22)])
    arguments = SFTConfig(folder, packing=True, max_length=64, bf16=False, **ARGUMENTS)
    return trained((SharedSFTTrainer if COUNT > 1 else SFTTrainer)(model(), arguments, train_dataset=data, processing_class=tokenizer()))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(97)}
    made = Tokenizer(models.WordLevel(words, "w0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w1", eos_token="w2", unk_token="w0")


def with_accelerate(folder: str) -> tuple[float, Any]:
    """A loop of one's own, whose gradients are averaged by DDP."""
    accelerator = Accelerator(cpu=True)
    own = model()
    own, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
    ids = torch.tensor(texts(31, 31, 31, 31))
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    given = {"labels": labels, "shift_labels": labels, "num_items_in_batch": int((labels >= 0).sum())}
    with context([ids, labels]) if COUNT > 1 else contextlib.nullcontext():
        loss = own(ids, **given).loss
        accelerator.backward(loss * COUNT)  # gradients are averaged over the processes
    optimizer.step()
    if COUNT > 1:
        dist.all_reduce(loss := loss.detach())
    return float(loss), own


STEPS = {step.__name__: step for step in (with_trainer, with_strobe, flattened, with_lora, with_trl, with_accelerate)}


def main() -> None:
    """Runs the steps one after the other, for each takes as long as its imports."""
    folder = Path(sys.argv[1])
    for name, step in STEPS.items():
        loss, found = step(str(folder / "run"))
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save((loss, {of.removeprefix("module."): x for of, x in found.state_dict().items()}), folder / name)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
