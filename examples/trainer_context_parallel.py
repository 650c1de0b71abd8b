"""transformers' Trainer on sequences that several processes share, each of which has some tokens of every sequence:

torchrun --nproc-per-node 2 examples/trainer_context_parallel.py

SharedSequences goes before any Trainer, TRL's SFTTrainer with packing among them: class MyTrainer(SharedSequences, SFTTrainer).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import strobe

OF_TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")


class SharedSequences:
    """All processes take the same batches, in one group for context parallelism; the model's gradients are averaged over them."""

    def get_train_dataloader(self: Any) -> DataLoader:
        """The batches of one process, in the same order on all: not distributed over processes."""
        sampler = self._get_train_sampler(self.train_dataset)
        return DataLoader(self.train_dataset, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator)

    def _prepare_context_parallel_inputs(self: Any, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The context of a training step. A label is of the next token, which another process may have: it is shifted before."""
        inputs["shift_labels"] = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        return partial(context, [inputs[name] for name in OF_TOKENS if name in inputs]), inputs

    def compute_loss(self: Any, *arguments: Any, **named: Any) -> Any:
        """This process's part of the loss, times their number, by which the average over processes is divided."""
        found = super().compute_loss(*arguments, **named)  # type: ignore[misc]
        size = dist.get_world_size()
        return (found[0] * size, *found[1:]) if isinstance(found, tuple) else found * size


def context(buffers: list[torch.Tensor]) -> AbstractContextManager[Any]:
    mesh = init_device_mesh(buffers[0].device.type, (dist.get_world_size(),))
    return strobe.distributed.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=buffers)


class SharedTrainer(SharedSequences, Trainer):
    pass


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="sdpa")
    texts = torch.randint(97, (8, 101))
    data = [{"input_ids": text, "labels": text} for text in texts]
    # The labels of a batch are counted once, as all processes have the same ones.
    options = {"average_tokens_across_devices": False, "use_cpu": not torch.cuda.is_available()}
    arguments = TrainingArguments("runs/shared", max_steps=4, report_to=[], save_strategy="no", **options)
    print(SharedTrainer(model, arguments, train_dataset=data).train().training_loss)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
