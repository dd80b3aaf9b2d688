"""The trainer: TRL's AsyncGRPOTrainer with our construction, data, loss, checkpoints and evaluation.

From TRL: the loop (transformers' Trainer underneath), the stream of named weights, the order of a weight sync, and the
two protocols. Ours: all else. `docs/design.md` lists it line by line, and a test holds the signatures of what is used,
so that an upgrade of TRL says what moved.
"""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PrinterCallback

from sparring.backend.compute_type import computes_on_cpu, settle_dtypes
from sparring.backend.folders import written_aside
from sparring.backend.objectives import Objective, load_objective
from sparring.backend.trainer.accumulation import GradientAccumulation
from sparring.backend.trainer.adapter import merged, save_adapter, served_name
from sparring.backend.trainer.allocator import LARGE_ROW, keep_freed_memory
from sparring.backend.trainer.checkpoint import (
    KeptCheckpoints,
    checkpoint_step,
    latest_checkpoint,
    lend_shards,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from sparring.backend.trainer.clock import StepClock
from sparring.backend.trainer.compiled import compile_ahead, compile_layers
from sparring.backend.trainer.critic import make_critic
from sparring.backend.trainer.evaluations import HeldOutEvaluations
from sparring.backend.trainer.interrupt import InterruptGuard
from sparring.backend.trainer.loop import LifeCycle, Steps
from sparring.backend.trainer.metrics import MetricsFile
from sparring.backend.trainer.optimizer import make_optimizer, plain_optimizer
from sparring.backend.trainer.passes import with_reward_kl
from sparring.backend.trainer.policy import load_policy, load_reference, refuse_truncated_sampling
from sparring.backend.trainer.probe import DriftReport, probe
from sparring.backend.trainer.protocols import BatchSource, StartEvaluation, WeightPublisher
from sparring.backend.trainer.ranks import Ranks, sharding_mesh
from sparring.backend.trainer.rejected import keep_batch
from sparring.backend.trainer.sharding import shard, whole, whole_parameters
from sparring.backend.trainer.sinks import Sinks
from sparring.backend.trainer.step import Scored, Step, logprobs_by_episode, make_step
from sparring.config import RunConfig
from sparring.errors import TrainerError
from sparring.types import Group, TokenSequence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental: TRL is pinned, and a test holds its signatures
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

__all__ = ["AgentTrainer"]


class AgentTrainer(AsyncGRPOTrainer):
    """Trains a policy on batches of groups, one optimizer step a batch, and publishes its weights after each.

    Args:
        model_path: Hugging Face folder of the policy to start from.
        adapter: folder of the adapter to start from, with `trainer.lora`; by default one that changes nothing yet.
        source: gives the batches; started after the first publication and stopped at the end of `train`.
        publisher: takes the weights.
        run_dir: where checkpoints, `metrics.jsonl` and rejected batches go.
        evaluate: begins an evaluation: before training, every `eval.every` steps and at the end.
        on_step: called with every record of `metrics.jsonl`, for a live display.
        probe_sequences: samples a few sequences from the engine, once its first weights are published: the trainer
            compares log-probabilities, and refuses to start where they are too far apart.
        on_trained: called after each step with its number and, by episode, the log-probabilities that its action
            tokens had before it: an array for each sequence, NaN elsewhere.
        sinks: get every record too; by default, those of `trainer.report_to`, for as long as `train` runs.
        objective: instead of the configuration's.

    Raises:
        ConfigError: the configuration cannot be trained; nothing has started.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: RunConfig,
        source: BatchSource,
        publisher: WeightPublisher,
        *,
        run_dir: Path,
        adapter: Path | None = None,
        evaluate: StartEvaluation | None = None,
        on_step: Callable[[Mapping[str, Any]], None] | None = None,
        probe_sequences: Callable[[], Sequence[TokenSequence]] | None = None,
        on_trained: Callable[[int, Mapping[str, Sequence[NDArray[np.float32]]]], None] | None = None,
        sinks: Sinks | None = None,
        objective: Objective | None = None,
        batch_timeout_s: float = 3600.0,
    ) -> None:
        config = settle_dtypes(config)
        knobs = config.trainer
        refuse_truncated_sampling(config.sampling)
        torch.set_num_threads(knobs.threads)
        if computes_on_cpu(knobs.device) and knobs.token_budget >= LARGE_ROW:
            keep_freed_memory()
        self.run_config = config
        self.objective: Objective = objective or load_objective(config.objective.name, config.objective.kwargs)
        random.seed(config.seed)
        np.random.seed(config.seed)
        torch.manual_seed(config.seed)
        model, tokenizer = load_policy(model_path, getattr(torch, knobs.dtype), knobs.lora, adapter)
        if knobs.compile:
            compile_layers(model)
        args = AsyncGRPOConfig(
            output_dir=str(run_dir),
            max_steps=knobs.steps,
            learning_rate=knobs.learning_rate,
            max_grad_norm=knobs.max_grad_norm,
            activation_checkpointing=knobs.gradient_checkpointing,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            token_budget=knobs.token_budget,
            max_staleness=config.rollout.staleness,
            use_cpu=computes_on_cpu(knobs.device),
            ddp_timeout=int(batch_timeout_s) + 1800,  # the other ranks wait while the main one waits for a batch
            bf16=False,  # autocast is the head's own; accelerate's would convert outputs once more
            seed=config.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        mesh = sharding_mesh(knobs.sharding, args.device)
        if mesh is not None:
            shard(model, mesh, getattr(torch, knobs.dtype))
        optimizer, scheduler = make_optimizer(model, knobs)
        # The grandparent's constructor: AsyncGRPOTrainer's own asks CUDA for its name and a vLLM server for its size.
        super(AsyncGRPOTrainer, self).__init__(
            model=model,
            args=args,
            train_dataset=[],
            processing_class=tokenizer,
            optimizers=(optimizer, scheduler),
        )
        self._ranks = Ranks(self.accelerator, mesh)
        # What the inherited methods read.
        self.args.ignore_data_skip = True
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._lora_sync = False
        self.model_version = 0
        self.vllm_client = None
        self._main = self._ranks.is_main
        self._source, self._publisher = source, publisher
        self.rollout_worker = source if self._main else None  # type: ignore[assignment]
        self.weight_transfer = publisher if self._main else None  # type: ignore[assignment]
        self._policy, self._tokenizer = model, tokenizer
        beside = model, model_path, getattr(torch, knobs.dtype), self.args.device
        refers = self.objective.needs_reference or self.objective.reward_kl
        self._reference = load_reference(*beside, mesh=mesh) if refers else None
        spec = self.objective.critic
        self._critic = make_critic(spec, *beside, mesh=mesh) if spec is not None else None
        self._clock = StepClock()
        self._accumulation = GradientAccumulation(
            self.objective,
            self.accelerator,
            self._ranks,
            self._clock,
            self.args.device,
            knobs.token_budget,
            reference=self._reference,
            critic=self._critic,
        )
        self._scheduler = scheduler
        self._run_dir = Path(run_dir)
        self._evaluations = HeldOutEvaluations(evaluate, config, self._report) if evaluate and self._main else None
        self._on_step = on_step
        self._probe_sequences = probe_sequences
        self._on_trained = on_trained
        self._batch_timeout_s = batch_timeout_s
        self._resume = False
        self._resume_from: Path | None = None
        self._guard = InterruptGuard()
        self._record: dict[str, Any] = {}
        self._groups: tuple[Group, ...] = ()
        self._step: Step | None = None
        self._scored: Mapping[int, Scored] = {}
        self._metrics_file: MetricsFile | None = None
        self._sinks = sinks
        self._kept = KeptCheckpoints(self._run_dir, newest=knobs.keep_checkpoints, best=knobs.keep_best)
        self.drift: DriftReport | None = None
        self.remove_callback(PrinterCallback)
        self.add_callback(LifeCycle(self))

    def _send_telemetry(self) -> None:
        """TRL's trainers report their construction to the hub; ours tells nobody."""

    # ---- the run ----

    def train(self, resume: bool = False, *, checkpoint_on_interrupt: bool = True) -> None:  # type: ignore[override]
        """Run `trainer.steps` optimizer steps in all; with `resume`, from the newest checkpoint, if there is one yet.

        Raises:
            ConfigError: a service of `trainer.report_to` does not begin.
            TrainerError: a batch cannot be trained, or a number is not finite; no weight has changed by it.
            KeyboardInterrupt: after Ctrl-C, between two steps; a checkpoint is saved first where asked.
        """
        self._resume = resume
        self._resume_from = latest_checkpoint(self._run_dir) if resume else None
        began_at = checkpoint_step(self._resume_from) if self._resume_from is not None else 0
        with self._ranks.together(), self._guard, self._reporting(began_at if resume else None):
            try:
                super().train()
            except KeyboardInterrupt:
                self._policy.zero_grad(set_to_none=True)
                if checkpoint_on_interrupt and self.state.global_step > began_at and not self._guard.held:
                    self.save_checkpoint()
                raise

    @contextmanager
    def _reporting(self, resume_from: int | None) -> Iterator[None]:
        if self._sinks is not None or not self._main:
            yield
            return
        self._sinks = Sinks(self.run_config, self._run_dir, resume_from)
        try:
            yield
        finally:
            self._sinks.close()
            self._sinks = None

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the steps done, atomically, unless there is one. Where sharded, all ranks call this."""
        step = self.state.global_step
        file = self._metrics_file  # the main rank's
        missing = file is not None and not (self._run_dir / f"checkpoint-{step}").exists()
        if self._ranks.sharded:
            missing = self._ranks.from_main(lambda: missing)
        if not missing:
            return
        with self._clock.phase("checkpoint"):
            if file is None:
                return lend_shards(self._policy, plain_optimizer(self.optimizer))
            save_checkpoint(
                self._run_dir,
                step,
                self._policy,
                self._tokenizer,
                plain_optimizer(self.optimizer),
                self._scheduler,
                lora=self.run_config.trainer.lora,
                also=self._critic.save if self._critic is not None else None,
            )
            self._kept.prune(file.rewards)

    def write_model(self, folder: Path, chat_template: str, adapter: Path | None = None) -> None:
        """Write the policy as a bfloat16 Hugging Face folder, with the chat template that it was trained under.

        The main rank writes; where parameters are sharded, all ranks call this.

        Args:
            adapter: where an adapter goes by itself, in PEFT's format; in `folder` it is merged.
        """
        if not self._main:
            return lend_shards(self._policy)
        self._tokenizer.chat_template = chat_template
        with written_aside(folder) as partial:
            save_model(partial, self._policy, self._tokenizer, torch.bfloat16)
        if adapter is not None and (lora := self.run_config.trainer.lora) is not None:
            with written_aside(adapter) as partial:
                save_adapter(partial, self._policy, self._tokenizer, lora)

    def publish(self) -> None:
        """Send the weights to the engine as version `global_step`."""
        with self._clock.phase("publish"):
            self.model_version = self.state.global_step - 1  # the sync adds one
            self._publisher.next_version = self.state.global_step
            self._sync_weight()
        self._metrics["train"].clear()  # TRL's own figures about the sync

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine takes: all weights; of an adapter its own tensors, or, for most servers, merged weights."""
        if self._ranks.sharded:
            yield from whole_parameters(self._policy)
        elif self.run_config.trainer.lora is None:
            yield from super()._streaming_iter()
        elif not self.run_config.serves_adapter:
            yield from merged(self._policy, self._policy.named_parameters())
        else:
            yield from ((served_name(name), tensor) for name, tensor in super()._streaming_iter())

    # ---- hooks of the loop ----

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *rest: Any) -> tuple[int, int]:
        out = super()._init_training_state(max_steps, num_update_steps_per_epoch, *rest)
        if self._resume_from is not None:
            self.state.global_step = checkpoint_step(self._resume_from)
        return out

    def _prepare_for_training(self, *args: Any) -> Any:
        out = super()._prepare_for_training(*args)
        if self._resume_from is not None:
            load_checkpoint(self._resume_from, self._policy, plain_optimizer(self.optimizer), self._scheduler)
            if self._critic is not None:
                self._critic.load(self._resume_from)
        return out

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:  # a finished run was resumed: the loop would ask for a batch before it looks
            self.control.should_training_stop = True

    def get_train_dataloader(self) -> Any:
        return Steps(self)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: Any
    ) -> tuple[list[Step], None]:
        return [next(epoch_iterator)], None

    def training_step(  # type: ignore[override]
        self, model: Any, inputs: Step, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward over all micro-batches of a step; the gradient is that of the step's loss."""
        model.train()
        accumulated = self._accumulation.accumulate(model, inputs, self._groups)
        self._step, self._scored = accumulated.step, accumulated.scored
        self._record |= accumulated.metrics
        return accumulated.loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = whole(super()._clip_grad_norm(model))
        self._record |= {"grad_norm": float(norm), "learning_rate": self._scheduler.get_last_lr()[0]}
        odd = {k: v for k, v in self._record.items() if isinstance(v, float) and not np.isfinite(v)}
        if odd:
            problem = f"step {self.state.global_step + 1}: not finite: {odd}. No weight has changed"
            raise TrainerError(f"{problem}; {self._keep_batch(problem)}")
        return norm

    def _update_critic(self) -> None:
        if self._critic is not None:
            self._record["critic/grad_norm"] = self._critic.update(self.run_config.trainer.max_grad_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers would look for padded input ids

    def _next_step(self) -> Step:
        version = self.state.global_step

        def next_groups() -> tuple[tuple[Group, ...], dict[str, float]]:
            with self._clock.phase("wait"):
                batch = self._source.next_batch(version, self._batch_timeout_s)
            return batch.groups, dict(batch.stats)

        self._groups, stats = self._penalise(*self._ranks.from_main(next_groups))
        self._record, self._step, self._scored = {"step": version + 1, "kind": "step", **stats}, None, {}
        try:
            self._step = make_step(self._groups, version, self.objective)
        except TrainerError as error:
            raise TrainerError(f"{error}; {self._keep_batch(str(error))}") from error
        return self._step

    def _penalise(
        self, groups: tuple[Group, ...], stats: dict[str, float]
    ) -> tuple[tuple[Group, ...], dict[str, float]]:
        """Put the KL to the reference policy into the rewards, where the objective wants it there."""
        coefficient = self.objective.reward_kl
        if not coefficient:
            return groups, stats
        with self._clock.phase("first_pass"):
            parts = self._reference, self.run_config.trainer.token_budget, self.args.device
            groups, divergence = with_reward_kl(groups, coefficient, *parts)
        return groups, stats | {"kl/behaviour_to_reference": divergence}

    def _finish_step(self) -> None:
        step = self.state.global_step
        self._clock.stop("optimizer")
        held = self._ranks.from_main(lambda: self._evaluations is not None and self._evaluations.count_step())
        if not held:
            self.publish()
        self._record |= self._clock.record(self._record["tokens/forwarded"])
        # The clock goes on at once and leaves no second out: what follows counts to the next step, but for an
        # evaluation, which counts to none. Reported before the checkpoint, or a kill between the two would lose it.
        self._clock.restart()
        with self._clock.phase("record"):
            self._report(self._record)
            if self._on_trained is not None and self._main:
                self._on_trained(step, logprobs_by_episode(self._groups, self._scored))
        every = self.run_config.trainer.checkpoint_every
        due = (every and step % every == 0) or step >= self.state.max_steps
        if self._ranks.from_main(lambda: self._awaits_evaluation(step)) or due:
            self.save_checkpoint()
        self._ranks.release(self._guard)
        if held and self._ranks.from_main(lambda: self._may_publish(step)):
            self.publish()
        if self._evaluations is not None and self._evaluations.due(step):
            with self._clock.uncounted():
                self._evaluate_now(step)

    def _begin(self) -> None:
        step = self.state.global_step
        if self._main:
            self._metrics_file = MetricsFile(self._run_dir / "metrics.jsonl", step if self._resume else None)
            self._publisher.init_weight_transfer()
        self.publish()
        sequences = self._ranks.from_main(lambda: self._probe_sequences and self._probe_sequences())
        if sequences is not None and (self._main or self._ranks.sharded):
            self.drift = probe(self._policy, sequences, self.run_config, device=self.args.device)
        if self.run_config.trainer.compile and step < self.state.max_steps:
            compile_ahead(self._policy, self.args.device, self.run_config.trainer.token_budget)
        self._evaluate_now(step)
        if self._main and step < self.state.max_steps:
            self._source.start()
        self._clock.restart()
        if self._ranks.sharded:
            self._guard.hold()

    def _awaits_evaluation(self, step: int) -> bool:
        return self._evaluations is not None and self._evaluations.due(step) and self._kept.await_evaluation(step)

    def _evaluate_now(self, step: int) -> None:
        if self._evaluations is not None and self._metrics_file and not self._metrics_file.evaluated(step):
            self._evaluations.begin(step)

    def _may_publish(self, step: int) -> bool:
        assert self._evaluations is not None
        with self._clock.phase("held"):
            return self._evaluations.over(step, self.model_version)

    def _report(self, record: Mapping[str, Any]) -> None:
        if self._metrics_file is None:
            return
        try:
            self._metrics_file.write(record)
        except TrainerError as error:
            if record["kind"] != "step":  # no batch in hand is at fault
                raise
            raise TrainerError(f"{error}; {self._keep_batch(str(error))}") from error
        if self._sinks is not None:
            self._sinks.write(record)
        if self._on_step is not None:
            self._on_step(record)
        if record["kind"] == "evaluation":
            self._kept.evaluated(record["step"], self._metrics_file.rewards)

    def _keep_batch(self, problem: str) -> str:
        """Write the batch in hand down for inspection, and say how to look at it."""
        samples = self._step.samples if self._step else ()
        return keep_batch(self._run_dir, problem, self._record, self._groups, samples, self._scored, write=self._main)
