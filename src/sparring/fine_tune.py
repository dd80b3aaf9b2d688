"""`sparring sft` and `sparring dpo`: another model out of the episodes that a run has recorded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.backend.buffer import BufferView
from sparring.backend.buffer.harvest import preference_pairs, rewarded_episodes
from sparring.backend.models import check_model, resolve_model
from sparring.config import RunConfig
from sparring.config_file import load_config
from sparring.display import fine_tuning_progress, open_console
from sparring.errors import ConfigError
from sparring.outputs import check_new_folder, writing
from sparring.run_dir import RunDirectory
from sparring.wiring import set_torch_environment

__all__ = ["FineTuning", "dpo", "sft"]


@dataclass(frozen=True)
class FineTuning:
    """What both commands are given.

    Attributes:
        run: whose buffer is read. Nothing in it is changed, and it may be running.
        out: the Hugging Face folder to write; `fine_tuning.json` in it says what it was made of.
        overwrite: replace the model that is there.
        model: to start from; None: the one that the run started from, after its warm start.
        overrides: dotted, over the run's configuration.
    """

    run: str
    out: Path
    model: str | None
    epochs: int
    learning_rate: float
    batch_size: int
    overrides: tuple[str, ...] = ()
    overwrite: bool = False


def sft(request: FineTuning, *, min_reward: float, per_task: int | None) -> int:
    """Rejection-sampling fine-tuning: cross-entropy on what the episodes with enough reward said, and on nothing else.

    Raises:
        ConfigError: no such run or model, or `out` is taken.
        TaskError: no episode has that reward.
        TrainerError: a loss is not finite.
    """
    if per_task is not None and per_task < 1:
        raise ConfigError(f"--per-task {per_task}: at least 1")
    directory, config = _open(request)
    with BufferView(directory.buffer) as view:
        harvest = rewarded_episodes(view, min_reward=min_reward, per_task=per_task)
    console = open_console()
    console.print(
        f"{len(harvest.sequences)} sequences of {harvest.episodes} episodes of {harvest.tasks} tasks, with a reward of "
        f"{min_reward:g} or more; {harvest.repeats} repeats left out",
        highlight=False,
    )
    steps = request.epochs * math.ceil(len(harvest.sequences) / request.batch_size)
    import torch

    from sparring.backend.compute_type import computes_on_cpu
    from sparring.backend.trainer.policy import load_policy
    from sparring.backend.trainer.warm_start import warm_start

    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.seed)
    start = resolve_model(_start(request, directory, config))
    policy, tokenizer = load_policy(start, getattr(torch, config.trainer.dtype))
    policy.to("cpu" if computes_on_cpu(config.trainer.device) else "cuda")  # type: ignore[arg-type]
    with fine_tuning_progress(console, steps) as show:
        losses = warm_start(
            policy,
            harvest.sequences,
            steps=steps,
            lr=request.learning_rate,
            batch_size=request.batch_size,
            token_budget=config.trainer.token_budget,
            seed=config.seed,
            on_step=show,
        )
    about = {"min_reward": min_reward, "per_task": per_task, "sequences": len(harvest.sequences), "losses": losses}
    _write(request, directory, config, policy, tokenizer, "sft", about)
    console.print(
        f"{steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token; wrote {request.out}", highlight=False
    )
    return 0


def dpo(request: FineTuning, *, beta: float, min_gap: float, pairs_per_group: int) -> int:
    """Direct preference optimisation by TRL's DPOTrainer, on pairs of one group whose rewards differ.

    Raises:
        ConfigError: no such run or model, or `out` is taken.
        TaskError: there is no pair.
        TrainerError: a loss is not finite.
    """
    if beta <= 0 or min_gap < 0 or pairs_per_group < 1:
        raise ConfigError("--beta is above 0, --min-gap at least 0, --pairs-per-group at least 1")
    directory, config = _open(request)
    with BufferView(directory.buffer) as view:
        pairs = preference_pairs(view, min_gap=min_gap, per_group=pairs_per_group)
    console = open_console()
    groups = len({pair.group_id for pair in pairs})
    console.print(f"{len(pairs)} pairs of {groups} groups; a step is {request.batch_size} of them", highlight=False)
    import torch

    from sparring.backend.trainer.dpo import train_dpo

    torch.set_num_threads(config.trainer.threads)
    total = request.epochs * math.ceil(len(pairs) / request.batch_size)
    with fine_tuning_progress(console, total, "DPO") as show:
        model, tokenizer, steps = train_dpo(
            resolve_model(_start(request, directory, config)),
            pairs,
            beta=beta,
            epochs=request.epochs,
            lr=request.learning_rate,
            batch_size=request.batch_size,
            seed=config.seed,
            device=config.trainer.device,
            dtype=getattr(torch, config.trainer.dtype),
            gradient_checkpointing=config.trainer.gradient_checkpointing,
            on_step=show,
        )
    about = {"beta": beta, "min_gap": min_gap, "pairs": len(pairs), "groups": groups, "steps": steps}
    _write(request, directory, config, model, tokenizer, "dpo", about)
    first, last = steps[0], steps[-1]
    console.print(
        f"{len(steps)} steps, loss {first['loss']:.3f} -> {last['loss']:.3f}, chosen above rejected in "
        f"{first['rewards/accuracies']:.0%} -> {last['rewards/accuracies']:.0%} of the step's pairs; "
        f"wrote {request.out}",
        highlight=False,
    )
    return 0


def _open(request: FineTuning) -> tuple[RunDirectory, RunConfig]:
    """The run and its configuration, all that can be wrong with the request told at once."""
    directory = RunDirectory.of(request.run)
    check_new_folder(request.out, overwrite=request.overwrite)
    if request.epochs < 1 or request.batch_size < 1 or not 0 < request.learning_rate < math.inf:
        raise ConfigError("--epochs and --batch-size are at least 1, --learning-rate above 0")
    config = load_config(directory.config, request.overrides).config
    check_model(_start(request, directory, config))
    set_torch_environment(config)
    from sparring.backend.compute_type import settle_dtypes

    return directory, settle_dtypes(
        config, lambda line: open_console().print(line, highlight=False), of=["trainer"]
    )


def _start(request: FineTuning, directory: RunDirectory, config: RunConfig) -> str:
    if request.model is not None:
        return request.model
    return str(directory.warm_start) if directory.warm_start.is_dir() else config.model.path


def _write(
    request: FineTuning,
    directory: RunDirectory,
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    method: str,
    about: dict[str, Any],
) -> None:
    """The model in bfloat16, with the template that its episodes were played under, and what it was made of."""
    import torch

    from sparring.backend.folders import written_aside
    from sparring.backend.gateway import ChatFormat
    from sparring.backend.trainer.checkpoint import save_model

    chat = ChatFormat.load(
        resolve_model(config.model.path),
        tool_template=config.model.tool_template,
        tool_format=config.model.tool_format,
        tools=False,  # the run has looked
    )
    tokenizer.chat_template = chat.template
    made_of = {
        "method": method,
        "run": str(directory.root),
        "model": request.model,
        "epochs": request.epochs,
        "learning_rate": request.learning_rate,
        "batch_size": request.batch_size,
        **about,
    }
    with writing(request.out), written_aside(request.out) as partial:
        save_model(partial, model, tokenizer, torch.bfloat16)
        (partial / "fine_tuning.json").write_text(json.dumps(made_of, indent=1))
