"""Direct preference optimisation (arXiv:2305.18290) on recorded pairs, by TRL's own DPOTrainer.

TRL's trainer takes text and makes tokens of it; ours hands it the tokens that were sampled, and a completion's mask, so
that a tool's result between two turns is context and in no log-probability. Loss, reference and metrics are TRL's.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)

from sparring.backend.buffer.harvest import Pair
from sparring.backend.compute_type import computes_on_cpu
from sparring.backend.trainer.policy import quiet
from sparring.errors import TrainerError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import DPOConfig, DPOTrainer

__all__ = ["PairTrainer", "train_dpo"]

_MOST_AT_ONCE = 4  # pairs of a forward; more only pad
# TRL calls transformers' checkpointing of activations by the names that it had before transformers 5.
_OLD_NAMES = r"`(is_gradient_checkpointing|gradient_checkpointing_\w+)` is deprecated"


class PairTrainer(DPOTrainer):
    """TRL's trainer over pairs that are tokens already."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def _send_telemetry(self) -> None:
        """TRL's trainers report their construction to the hub; ours tells nobody."""


def train_dpo(
    model_path: Path,
    pairs: Sequence[Pair],
    *,
    beta: float,
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int = 0,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Mapping[str, float]]]:
    """Train the model in the folder `model_path` to prefer what was rewarded; the model as it stands is the reference.

    Args:
        beta: of the paper: the strength of the pull to the reference.
        batch_size: pairs a step.
        dtype: compute type on a GPU; weights are float32. A CPU computes in float32.
        on_step: called after every step with its number, from 0, and its loss.

    Returns:
        model, tokenizer, and TRL's metrics of every step.

    Raises:
        TrainerError: a loss is not finite.
    """
    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        model, reference = (AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32) for _ in range(2))
    on_cpu = computes_on_cpu(device)
    at_once = math.gcd(batch_size, _MOST_AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="sparring-dpo-") as folder:
        trainer = PairTrainer(
            model=model,
            ref_model=reference,
            args=DPOConfig(
                output_dir=folder,
                beta=beta,
                learning_rate=lr,
                num_train_epochs=epochs,
                per_device_train_batch_size=at_once,
                gradient_accumulation_steps=batch_size // at_once,
                warmup_steps=0.1,
                max_length=None,  # what was sampled is within the model's context; nothing is cut
                activation_checkpointing=gradient_checkpointing,
                remove_unused_columns=False,
                use_cpu=on_cpu,
                bf16=dtype == torch.bfloat16 and not on_cpu,
                seed=seed,
                logging_steps=1,
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            data_collator=_Collator(int(tokenizer.pad_token_id or 0)),
            train_dataset=Dataset.from_list([_columns(pair) for pair in pairs]),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Watch(on_step))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_OLD_NAMES, category=FutureWarning)
            trainer.train()
    return model, tokenizer, [record for record in trainer.state.log_history if "loss" in record]


class _Watch(TrainerCallback):
    """Tells every step, and ends the training at a loss that is not finite."""

    def __init__(self, on_step: Callable[[int, float], None]) -> None:
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:  # the summary at the end
            return
        if not math.isfinite(logs["loss"]):
            raise TrainerError(f"DPO: the loss of step {state.global_step} is {logs['loss']}; lower --learning-rate")
        self._on_step(state.global_step - 1, logs["loss"])


def _columns(pair: Pair) -> dict[str, list[int]]:
    """TRL's columns of a pair, and the masks that TRL takes for granted."""
    return {
        "prompt_ids": pair.prompt_ids.tolist(),
        "chosen_ids": pair.chosen_ids.tolist(),
        "rejected_ids": pair.rejected_ids.tolist(),
        "chosen_mask": pair.chosen_mask.astype(int).tolist(),
        "rejected_mask": pair.rejected_mask.astype(int).tolist(),
    }


class _Collator:
    """As TRL's `DataCollatorForPreference`: first all that was chosen, then all that was rejected, padded at the right;
    but `completion_mask` is 1 at the tokens that the model said alone."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad_token_id = pad_token_id

    def __call__(self, examples: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids, masks = [], []
        for side in ("chosen", "rejected"):
            for example in examples:
                prompt = example["prompt_ids"]
                ids.append(torch.tensor(prompt + example[f"{side}_ids"]))
                masks.append(torch.tensor([0] * len(prompt) + example[f"{side}_mask"]))
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        return {
            "input_ids": _padded(ids, self._pad_token_id),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "completion_mask": _padded(masks, 0),
        }


def _padded(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
