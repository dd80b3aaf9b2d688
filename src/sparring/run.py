"""One training run: wires environment, agent, gateway, engine, buffer and trainer together, and owns their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sparring.config_file import LoadedConfig
from sparring.display import Display, fine_tuning_progress, open_console
from sparring.errors import ConfigError, SparringError, TaskError
from sparring.extras import lacking
from sparring.follower import follow, is_alone, is_follower, share_start
from sparring.held_out import HeldOut
from sparring.interrupt import interruptible
from sparring.preflight import check_start
from sparring.report import print_report, write_report
from sparring.run_dir import RunDirectory
from sparring.sampling_line import failure_line, sampling_line
from sparring.task_sources import make_episode_runner, make_sampler, open_sources
from sparring.wiring import (
    make_engine,
    make_policy,
    sampling_params,
    set_torch_environment,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sparring.config import RunConfig
    from sparring.types import TokenSequence

__all__ = ["train"]

_DEMONSTRATIONS = 1024
_PROBE_TASKS = 8
_NOTHING_SHARDED = (
    "trainer.sharding={}: this run is one process, which holds everything; "
    "`torchrun --nproc-per-node N --no-python sparring train ...` starts N that share it"
)


def train(loaded: LoadedConfig, *, resume: bool = False) -> int:
    """Run to the end, or to Ctrl-C, after which `resume` goes on. Returns the exit status.

    Where torchrun started several of it, the main one does all of this, and the others train along.

    Raises:
        SparringError: what ended the run; its folder stays resumable.
    """
    if is_follower():
        return follow(loaded, resume=resume)
    try:
        directory = RunDirectory.open(loaded, resume=resume)
    except ConfigError as error:
        raise _with_others(error, loaded.config) from error
    console = open_console()
    if directory.finished_steps < loaded.config.trainer.steps:
        check_start(loaded.config)
        if resume:
            newest = directory.newest_checkpoint
            whence = "no checkpoint yet: from the beginning" if newest is None else f"from checkpoint-{newest}"
            console.print(f"resuming {directory.root}, {whence}", highlight=False)
        if loaded.config.trainer.sharding != "none" and is_alone():
            console.print(_NOTHING_SHARDED.format(loaded.config.trainer.sharding), highlight=False)
        set_torch_environment(loaded.config)
        with interruptible():
            try:
                with ExitStack() as stack:
                    _Run(directory.as_begun(loaded), directory, console, stack, resume=resume).play()
            except KeyboardInterrupt:
                console.print(f"stopped; the same command with --resume goes on with the run in {directory.root}")
                return 130
    print_report(console, directory)
    return 0


def _with_others(error: ConfigError, config: RunConfig) -> ConfigError:
    """What is wrong with the folder, and on lines of their own what else is: who mends one shall not meet the next."""
    problems = [str(error)]
    for check in (check_start, open_sources):
        try:
            check(config)
        except (SparringError, ImportError) as other:
            problems.append(lacking(other) or str(other))
    return ConfigError("\nbesides: ".join(problems))


class _Run:
    """The parts of one run. `stack` ends them, in the reverse order of their making."""

    def __init__(
        self, loaded: LoadedConfig, directory: RunDirectory, console: Console, stack: ExitStack, *, resume: bool
    ) -> None:
        self._began, self._resume = time.monotonic(), resume
        self.directory, self.console = directory, console
        self.sources = open_sources(loaded.config)
        policy = make_policy(loaded.config)
        # What a user has misspelt is told by now: from here on torch is imported, which takes its time.
        from sparring.backend.buffer import TrajectoryBuffer
        from sparring.backend.compute_type import settle_dtypes
        from sparring.backend.gateway import ChatFormat, Recorder
        from sparring.backend.gateway.http import GatewayServer
        from sparring.backend.lora import check_lora
        from sparring.backend.models import resolve_model
        from sparring.backend.objectives import load_objective
        from sparring.backend.rollout import RolloutWorker
        from sparring.backend.trainer.policy import refuse_truncated_sampling
        from sparring.backend.trainer.sinks import Sinks
        from sparring.backend.weights import LendingWorker

        sampler = make_sampler(self.sources, loaded.config)
        load_objective(loaded.config.objective.name, loaded.config.objective.kwargs)
        refuse_truncated_sampling(loaded.config.sampling)
        self.config = config = settle_dtypes(loaded.config, self._tell)
        console.print(f"run folder {directory.root}; preparing the model {config.model.path}", highlight=False)
        model = resolve_model(config.model.path)
        self.chat = ChatFormat.load(
            model,
            tool_template=config.model.tool_template,
            tool_format=config.model.tool_format,
            history=config.model.history,
            tools=any(source.tools for source in self.sources),
        )
        lora = config.trainer.lora
        if lora is not None:
            check_lora(model, lora)
        self.sinks = Sinks(config, directory.root, (directory.newest_checkpoint or 0) if resume else None)
        stack.callback(self.sinks.close)
        directory.claim(replace(loaded, config=config))
        self.model, self.adapter = model, None
        if config.warm_start.steps and lora is None:
            self.model = self._warm_started(model)
        elif config.warm_start.steps:
            self.adapter = self._warm_started(model)
        served = lora if config.serves_adapter else None
        self.engine = make_engine(config, self.model, directory.root, lora=served)
        self.buffer = TrajectoryBuffer.open(directory.buffer)
        stack.callback(self.buffer.close)
        self._pruned_to = 0
        recorder = Recorder(
            self.engine,
            self.chat,
            sampling_params(config),
            max_length=config.model.max_length,
            aliases=config.agent.model_names,
        )
        make_worker = LendingWorker if config.engine.release_memory else RolloutWorker
        self.worker = make_worker(
            engine=self.engine,
            recorder=recorder,
            run_episode=make_episode_runner(self.sources, policy, config),
            sampler=sampler,
            config=config.rollout,
            buffer=self.buffer,
            server=None if config.agent.policy == "native" else GatewayServer(recorder),
            on_wait=lambda stats: self.display.waiting(sampling_line(stats, config.rollout)),
        )
        stack.callback(self.worker.stop)
        self.display = stack.enter_context(Display(config.trainer.steps, console))

    def _tell(self, line: str) -> None:
        self.console.print(line, highlight=False)

    def play(self) -> None:
        from sparring.backend.trainer.trainer import AgentTrainer
        from sparring.backend.weights import WeightPublisher

        self.display.status("starting the engine and the trainer")
        share_start(self.config.trainer.device, (self.model, self.adapter, self.config))
        trainer = AgentTrainer(
            self.model,
            self.config,
            source=self.worker,
            publisher=WeightPublisher(self.worker, self.engine),
            run_dir=self.directory.root,
            adapter=self.adapter,
            evaluate=HeldOut(self.config, self.sources, self.worker, self.directory, self.display),
            on_step=self._show,
            probe_sequences=self._probe_sequences,
            on_trained=self._keep,
            sinks=self.sinks,
        )
        trainer.train(resume=self._resume)
        self.display.status("writing the trained model")
        trainer.write_model(self.directory.model, self.chat.template, adapter=self.directory.adapter)
        title = f"{self.config.model.path} on {self.config.env.title}"
        write_report(
            self.directory,
            title,
            staleness=self.config.rollout.staleness,
            keep_best=self.config.trainer.keep_best,
            wall_s=time.monotonic() - self._began,
        )

    def _show(self, record: Mapping[str, Any]) -> None:
        self.display.step(record)
        if record["kind"] == "step" and (line := failure_line(self.worker.stats().last_batch)):
            self.console.print(f"step {record['step']:.0f}: {line}", highlight=False, soft_wrap=True)

    def _keep(self, step: int, logprobs: Mapping[str, Sequence[NDArray[np.float32]]]) -> None:
        """What the buffer keeps of trained episodes, and for how long: never less than a resume may need."""
        self.buffer.keep_trained_logprobs(step, logprobs)
        if self.config.rollout.keep_steps is not None:
            resumable = self.directory.resumable_step(self.config.trainer.keep_checkpoints)
            horizon = min(step - self.config.rollout.keep_steps, resumable)
            if horizon > self._pruned_to:
                self.buffer.prune(horizon)
                self._pruned_to = horizon

    def _probe_sequences(self) -> Sequence[TokenSequence]:
        """What the engine samples, as training will sample it, for the trainer to score."""
        show = self.display.counting("probing whether trainer and engine agree on log-probabilities")
        each = -(-_PROBE_TASKS // len(self.sources))
        tasks = {source.name: source.train[:each] for source in self.sources}
        trajectories = self.worker.start_probe(tasks, sampling=sampling_params(self.config)).result(show)
        sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
        failures = [t.failure.message for t in trajectories if t.failure is not None]
        if len(failures) == len(trajectories) and not sequences:  # an answer that is cut may well fail an agent
            raise TaskError(f"no episode of the start-up probe could be played; the first failed thus: {failures[0]}")
        return sequences

    async def _supervised_sequences(self) -> list[TokenSequence]:
        from sparring.chat_data import read_sequences
        from sparring.demonstrations import record_demonstrations

        if self.config.warm_start.data is not None:
            data = Path(self.config.warm_start.data)
            return await read_sequences(data, self.chat, max_length=self.config.model.max_length)
        sequences = []
        each = -(-_DEMONSTRATIONS // len(self.sources))
        for source in self.sources:
            tasks = source.train[:each]
            sequences += await record_demonstrations(self.config, self.chat, source.part, tasks, self.config.seed)
        return sequences

    def _warm_started(self, model: Path) -> Path:
        """The model, or its adapter, after supervised steps; made once, kept in the run folder."""
        import torch

        from sparring.backend.compute_type import computes_on_cpu
        from sparring.backend.folders import written_aside
        from sparring.backend.trainer.adapter import adapter_dropout, save_adapter
        from sparring.backend.trainer.checkpoint import save_model
        from sparring.backend.trainer.policy import load_policy
        from sparring.backend.trainer.warm_start import warm_start

        folder, knobs, lora = self.directory.warm_start, self.config.warm_start, self.config.trainer.lora
        if folder.is_dir():
            return folder
        sequences = asyncio.run(self._supervised_sequences())
        origin = knobs.data or "demonstrations"
        self.console.print(f"warm start: {knobs.steps} supervised steps on {len(sequences)} sequences of {origin}")
        torch.manual_seed(self.config.seed)
        policy, tokenizer = load_policy(model, getattr(torch, self.config.trainer.dtype), lora)
        policy.to("cpu" if computes_on_cpu(self.config.trainer.device) else "cuda")  # type: ignore[arg-type]
        progress = fine_tuning_progress(self.console, knobs.steps)
        with adapter_dropout(policy, lora.dropout if lora is not None else 0.0), progress as show:
            losses = warm_start(
                policy,
                sequences,
                steps=knobs.steps,
                lr=knobs.learning_rate,
                batch_size=knobs.batch_size,
                token_budget=self.config.trainer.token_budget,
                seed=self.config.seed,
                on_step=show,
            )
        self.console.print(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")
        with written_aside(folder) as partial:
            if lora is None:
                save_model(partial, policy, tokenizer)
            else:
                save_adapter(partial, policy, tokenizer, lora)
        return folder
