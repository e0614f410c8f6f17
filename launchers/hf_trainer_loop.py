"""transformers' `Trainer` with what a trial needs of it: each step's loss and boundaries, and what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from step_window import StepWindow
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback


def make_arguments(fields: Mapping[str, Any]) -> TrainingArguments:
    """Return Trainer's arguments; with several ranks this joins them (Accelerate's `PartialState`)."""
    return TrainingArguments(**fields)


class StepTrainer(Trainer):
    """`Trainer` that keeps the loss of the current optimizer step and decays every weight, as `cpu` does."""

    def __init__(self, model: Any, arguments: TrainingArguments, **options: Any) -> None:
        super().__init__(model, arguments, **options)
        self.remove_callback(PrinterCallback)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.layers = len(base.model.layers)
        self.step_loss: Tensor | float = 0.0
        self.draws_again = False
        """Whether Accelerate has fetched the next micro-batch, as it does, before the window's nonce was known."""
        self.trained: list[tuple[int, int]] = []
        """Shape of each micro-batch of the current step."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        numbers = inputs.pop("number")
        if self.draws_again:
            self.draws_again = False
            again = self.data_collator([self.train_dataset[number] for number in numbers.tolist()])
            inputs = {name: again[name].to(numbers.device) for name in inputs}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.step_loss = self.step_loss + loss.double()
        self.trained.append(tuple(inputs["input_ids"].shape))
        return loss

    def average(self, losses: list[Any]) -> list[float]:
        """Return each step's loss over the global batch; every rank calls it.

        A rank's loss is its share of the sum over all tokens, divided by their number and multiplied by the ranks.
        """
        mine = torch.stack([torch.as_tensor(loss) for loss in losses])
        dist.all_reduce(mine)
        return list(map(float, mine / dist.get_world_size()))

    def count_parameters(self) -> int:
        """Return the whole model's parameters on the first rank, 0 on the others; FSDP2's know their whole size."""
        if dist.get_rank():
            return 0
        if hasattr(self.model, "get_nb_trainable_parameters"):  # PEFT's; it knows how many 4-bit weights are in a byte
            return int(self.model.get_nb_trainable_parameters()[1])
        return sum(parameter.numel() for parameter in self.model.parameters())

    def read_work(self) -> dict[str, Any]:
        """Return what was trained, by the shapes of the last step's micro-batches."""
        return {
            "global_batch_size": sum(rows for rows, _ in self.trained) * dist.get_world_size(),
            "seq_len": self.trained[0][1],
            "num_layers": self.layers,
            "precision": "bf16" if self.args.bf16 else "fp32",
        }


class TrialCallback(TrainerCallback):
    """Measures from the end of one optimizer step to the end of the next, so that loading data counts too."""

    def __init__(self, window: StepWindow) -> None:
        self.window = window
        self.trainer: StepTrainer | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.window.open_step()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        assert trainer is not None
        loss, trainer.step_loss = trainer.step_loss, 0.0
        self.window.close_step(loss)
        if self.window.step < self.window.num_steps:
            trainer.trained.clear()
            self.window.open_step()
            trainer.draws_again = self.window.step == self.window.first_timed
