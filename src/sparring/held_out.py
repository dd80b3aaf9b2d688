"""The evaluations of a run: held-out tasks, greedy, beside the training episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparring.config import RunConfig
from sparring.display import Display
from sparring.errors import TaskError
from sparring.evaluation import EvalEpisode, summarise, write_episodes
from sparring.run_dir import RunDirectory
from sparring.task_sources import TaskSource
from sparring.wiring import sampling_params

if TYPE_CHECKING:
    from sparring.backend.rollout import RolloutWorker
    from sparring.backend.rollout.evaluation import RunningEvaluation

__all__ = ["HeldOut"]


@dataclass(frozen=True)
class HeldOut:
    """What the trainer calls to begin an evaluation of the engine's weights, those of one step."""

    config: RunConfig
    sources: Sequence[TaskSource]
    worker: RolloutWorker
    directory: RunDirectory
    display: Display

    def __call__(self, step: int, *, beside: bool) -> _Pending:
        tasks = {source.name: source.held_out for source in self.sources}
        show = self.display.counting(f"evaluating {sum(map(len, tasks.values()))} held-out tasks at step {step}")
        played = self.worker.start_evaluation(
            tasks,
            split=self.config.eval.split,
            sampling=dataclasses.replace(sampling_params(self.config), temperature=0.0),
            version=step,
            beside=beside,
        )
        return _Pending(self, played, show)


@dataclass(frozen=True)
class _Pending:
    held_out: HeldOut
    played: RunningEvaluation
    show: Callable[[int, int], None]

    def done(self) -> bool:
        return self.played.done()

    def result(self) -> Mapping[str, Any]:
        """Wait, write the episodes down, and give the figures.

        Raises:
            TaskError: every episode failed.
        """
        run, step = self.held_out, self.played.version
        episodes = [EvalEpisode.of(trajectory) for trajectory in self.played.result(self.show)]
        write_episodes(run.directory.evaluation(step), episodes)
        failures = [episode.failure["message"] for episode in episodes if episode.failure is not None]
        if len(failures) == len(episodes):
            raise TaskError(f"no held-out episode could be played at step {step}; the first failed thus: {failures[0]}")
        summary = summarise(step, episodes)
        run.display.evaluation(summary)
        by_env = {}
        if len(run.sources) > 1:
            parts = {source.name: [e for e in episodes if e.env == source.name] for source in run.sources}
            of_env = {name: summarise(step, part) for name, part in parts.items()}
            by_env = {f"env/{name}/success": part.success for name, part in of_env.items() if part.episodes}
        return {key: value for key, value in vars(summary).items() if key != "step"} | by_env
