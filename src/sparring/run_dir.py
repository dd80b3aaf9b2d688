"""What a run leaves, and where."""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sparring.config_file import LoadedConfig, load_config
from sparring.errors import ConfigError

__all__ = ["RunDirectory"]

_LONGEST_VALUE = 80


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def buffer(self) -> Path:
        """Every episode, in SQLite."""
        return self.root / "buffer.sqlite"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    def evaluation(self, step: int) -> Path:
        """The held-out episodes at one step: one JSON object a task."""
        return self.root / "evaluations" / f"step-{step:06d}.jsonl"

    @property
    def warm_start(self) -> Path:
        """The model, or the adapter, after its supervised warm start, where there was one."""
        return self.root / "warm_start"

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """What was trained of it, where that is an adapter alone: a folder in PEFT's format."""
        return self.root / "adapter"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    @property
    def newest_model(self) -> Path | None:
        """The trained model, or the last checkpoint while there is none: a Hugging Face folder, or an adapter's."""
        checkpoints = [self.checkpoint(step) for step in reversed(self._checkpoint_steps)]
        whole = [f for f in (self.model, *checkpoints) if f.is_dir()]  # they are written aside
        return next(iter(whole), None)

    @property
    def newest_checkpoint(self) -> int | None:
        """Its step; None while there is none."""
        return max(self._checkpoint_steps, default=None)

    def resumable_step(self, checkpoints: int) -> int:
        """The step that the run may have to go on from, should all but the last of its newest checkpoints be damaged;
        0, its start, while there are not so many."""
        steps = self._checkpoint_steps
        return steps[-checkpoints] if len(steps) >= checkpoints else 0

    @property
    def _checkpoint_steps(self) -> list[int]:
        names = [folder.name.partition("-")[2] for folder in self.root.glob("checkpoint-*")]
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def curve(self) -> Path:
        return self.root / "curve.png"

    @property
    def summary(self) -> Path:
        """Written last."""
        return self.root / "summary.json"

    @property
    def finished_steps(self) -> int:
        """Steps of the finished run in here; 0 where none is finished."""
        return json.loads(self.summary.read_text())["steps"] if os.access(self.summary, os.R_OK) else 0

    @classmethod
    def of(cls, run: str) -> RunDirectory:
        """The folder of a run that there is, whatever state it is in.

        Raises:
            ConfigError: there is no run in it.
        """
        directory = cls(Path(run))
        if not directory.buffer.is_file():
            raise ConfigError(f"{run} is no run folder: it holds no {directory.buffer.name}")
        return directory

    @classmethod
    def open(cls, loaded: LoadedConfig, *, resume: bool) -> RunDirectory:
        """The folder for a run: that no run is in it yet, or that the one in it can go on. Nothing is left in it.

        Raises:
            ConfigError: a new run where one is; no run to resume; another configuration than the run's; or the folder
                cannot be made or written.
        """
        directory = cls(loaded.run_dir)
        if os.path.exists(directory.root) and not os.path.isdir(directory.root):
            raise ConfigError(f"run_dir: {directory.root} is a file; name a folder")
        if directory.finished_steps < loaded.config.trainer.steps:
            with directory._writing(), tempfile.TemporaryFile(dir=directory._nearest_folder()):
                pass
        taken = directory.config.is_file()
        if taken and not resume:
            raise ConfigError(
                f"{directory.root} holds a run already: add --resume to go on with it, choose another "
                "run_dir=..., or delete the folder"
            )
        if resume and not taken:
            raise ConfigError(f"there is no run to resume in {directory.root}; leave --resume out to start one")
        if taken and (differing := _differences(load_config(directory.config), directory.as_begun(loaded))):
            raise ConfigError(
                f"the run in {directory.root} began with another {', '.join(differing)}: resume it as it was "
                f"(sparring train {directory.config} --resume), or start a new one in another run_dir=..."
            )
        return directory

    def as_begun(self, loaded: LoadedConfig) -> LoadedConfig:
        """`loaded`, which asks for `auto`, with the types that the run in here settled on, whatever machine it was on.
        Where there is no run yet, as it is."""
        if not self.config.is_file():
            return loaded
        begun, config = load_config(self.config).config, loaded.config
        kept = {
            name: section.model_copy(update={"dtype": before.dtype})
            for name, section, before in (
                ("engine", config.engine, begun.engine),
                ("trainer", config.trainer, begun.trainer),
            )
            if section.dtype == "auto"
        }
        return replace(loaded, config=config.model_copy(update=kept))

    def claim(self, loaded: LoadedConfig) -> None:
        """From here on there is a run in the folder. Called once its configuration has shown that it can start.

        Raises:
            ConfigError: the folder cannot be made or written.
        """
        with self._writing():
            self.root.mkdir(parents=True, exist_ok=True)
            if not self.config.is_file():
                self.config.write_text(loaded.to_yaml())

    def _nearest_folder(self) -> Path:
        """The run's, or the innermost that there is of those that it will lie in."""
        return next(place for place in (self.root, *self.root.absolute().parents) if place.exists())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"run_dir: cannot write to {self.root}: {error.strerror}") from error


# What may change between a run and its continuation: how long it goes on, where it runs and in what memory, how long it
# waits, and what it shows. None of it changes what is learnt, but some may be why the run broke off.
_FREE_KEYS = (
    "run_dir",
    "trainer.steps",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.report_to",
    "trainer.threads",
    "trainer.sharding",
    "trainer.token_budget",
    "trainer.gradient_checkpointing",
    "trainer.compile",
    "eval.every",
    "eval.during_training",
    "engine.threads",
    "engine.slots",
    "engine.python",
    "engine.urls",
    "engine.environment",
    "engine.servers",
    "engine.memory_fraction",
    "engine.weights",
    "engine.bucket_mib",
    "engine.verify_weights",
    "engine.group_host",
    "rollout.keep_steps",
    "rollout.max_running_groups",
    "rollout.buffer_groups",
    "rollout.max_refill",
    "rollout.episode_timeout_s",
)


def _differences(before: LoadedConfig, now: LoadedConfig) -> list[str]:
    """Each key that may not change and has, with the value that it had and the one that it is to have."""
    had = {key: value for key, value, _ in before.lines()}
    return [
        f"{key} ({_short(had.get(key))}, now {_short(value)})"
        for key, value, _ in now.lines()
        if key not in _FREE_KEYS and had.get(key) != value
    ]


def _short(value: str | None) -> str:
    return textwrap.shorten(value or "null", _LONGEST_VALUE)
