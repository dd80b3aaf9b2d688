"""`sparring eval`: play held-out episodes with a model that is not being trained, and say how often it solves them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sparring.agents.policy import Policy
from sparring.agents.runner import make_env, make_runner
from sparring.collector import seldom_collecting
from sparring.config import EnvPart
from sparring.display import open_console
from sparring.errors import ConfigError, EngineError, TaskError, first_error
from sparring.eval_display import EvalProgress, print_results
from sparring.eval_log import EvalLog
from sparring.eval_subject import Subject, find_subject
from sparring.evaluation import EvalEpisode
from sparring.interrupt import interruptibly
from sparring.preflight import check_engine, check_packages
from sparring.wiring import make_engine, make_policy, sampling_params, set_torch_environment

if TYPE_CHECKING:
    from sparring.backend.buffer import GroupSpec
    from sparring.backend.engines.base import Engine, SamplingParams
    from sparring.backend.rollout.episode import Sessions
    from sparring.types import Trajectory

__all__ = ["EvalRequest", "evaluate"]

_START_TIMEOUT_S = 900.0
_WATCH_S = 2.0
_MISSED = 3


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate.

    Attributes:
        model: a Hugging Face folder, a run's folder, one of its checkpoints, or a name that `base_url` serves.
        envs: none: that of the run.
        episodes: of each environment, in all; None: each task of the split `samples` times.
        temperature: None: greedy where a task is tried once, else the run's.
        out: JSONL, taken up again where it is half done.
        overwrite: begin it anew instead.
        overrides: dotted, over the configuration.
    """

    model: str
    envs: tuple[EnvPart, ...] = ()
    episodes: int | None = None
    samples: int = 1
    split: str = "test"
    temperature: float | None = None
    policy: str | None = None
    out: Path | None = None
    overwrite: bool = False
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    deadline_s: float | None = None
    concurrency: int = 32
    overrides: tuple[str, ...] = ()


def evaluate(request: EvalRequest) -> int:
    """Play what is missing, print the table. Returns the exit status: 1 where an environment has no finished episode.

    Raises:
        ConfigError: the request cannot be met, and what would do.
        SparringError: what ended the evaluation; `out` keeps what was played.
    """
    _check(request)
    check_packages("an evaluation", remote=bool(request.base_url))
    console = open_console()
    subject = find_subject(
        request.model, request.envs[0].id if request.envs else "", _overrides(request), remote=bool(request.base_url)
    )
    if subject.folder is not None:
        check_engine(subject.config.engine)
    envs = request.envs or subject.config.env.parts
    plans = [_plan(env, request, subject.config.seed) for env in envs]
    sampling = _sampling(request, subject)
    set_torch_environment(subject.config)
    policy = make_policy(subject.config)
    log = EvalLog(request.out, _settings(request, subject, sampling), overwrite=request.overwrite)
    try:
        asyncio.run(interruptibly(_Evaluation(request, subject, policy, sampling, log, console).play(plans)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        kept = f"the same command goes on with the {len(log.episodes)} episodes in {log.path}"
        console.print(f"stopped; {kept if log.path else 'nothing is kept without --out'}", highlight=False)
        return 130
    finally:
        log.close()
    results = {plan.name: [log.episodes[key] for key in plan.keys] for plan in plans}
    print_results(console, results, request.samples)
    return 0 if all(any(e.reward is not None for e in episodes) for episodes in results.values()) else 1


@dataclass(frozen=True)
class _Plan:
    """The episodes of one environment."""

    env: EnvPart
    name: str
    groups: tuple[GroupSpec, ...]
    tools: bool

    @property
    def members(self) -> list[tuple[GroupSpec, int]]:
        return [(group, member) for group in self.groups for member in range(group.size)]

    @property
    def keys(self) -> list[tuple[str, str, int]]:
        return [(self.name, group.task_id, member) for group, member in self.members]


def _plan(env: EnvPart, request: EvalRequest, seed: int) -> _Plan:
    """The first tasks of the split, as evaluations in training take them."""
    from sparring.backend.rollout.evaluation import evaluation_specs

    made = make_env(env.id, env.kwargs)
    try:
        task_ids = made.task_ids(request.split)
    finally:
        made.close()
    if not task_ids:
        raise TaskError(f"the split {request.split!r} of {env.id} has no tasks")
    tasks = len(task_ids) if request.episodes is None else request.episodes // request.samples
    if tasks > len(task_ids):
        raise ConfigError(
            f"--episodes {request.episodes}: the split {request.split!r} of {env.id} has {len(task_ids)} tasks, "
            f"{len(task_ids) * request.samples} episodes at most; --k tries each task more often"
        )
    chosen = [task_ids[i] for i in range(tasks)]
    specs = evaluation_specs(
        env.id, chosen, split=request.split, seed=seed, prefix=f"eval.{env.label}", samples=request.samples
    )
    return _Plan(env, env.label, tuple(specs), bool(made.tools))


@dataclass(frozen=True)
class _Evaluation:
    """What all environments of one evaluation share."""

    request: EvalRequest
    subject: Subject
    policy: Policy
    sampling: SamplingParams
    log: EvalLog
    console: Console

    async def play(self, plans: Sequence[_Plan]) -> None:
        """Play what the log lacks. Failures of an earlier evaluation are tried again."""
        missing = {plan.name: self._missing(plan) for plan in plans}
        if not any(missing.values()):
            return
        self.console.print(f"preparing {self.subject.name}", highlight=False)
        async with self._sessions(tools=any(plan.tools for plan in plans)) as sessions:
            with seldom_collecting():  # by now all that it is to leave alone has been imported
                for plan in plans:
                    if missing[plan.name]:
                        await self._play_plan(plan, missing[plan.name], sessions)

    def _missing(self, plan: _Plan) -> list[tuple[GroupSpec, int]]:
        played = (self.log.episodes.get(key) for key in plan.keys)
        return [m for m, e in zip(plan.members, played, strict=True) if e is None or e.failure is not None]

    async def _play_plan(self, plan: _Plan, missing: Sequence[tuple[GroupSpec, int]], sessions: Sessions) -> None:
        from sparring.backend.rollout.episode import EpisodePlayer
        from sparring.backend.rollout.evaluation import play_evaluation
        from sparring.backend.rollout.scheduler import ATTEMPTS

        rollout = self.subject.config.rollout
        runner = make_runner(
            plan.env.id, plan.env.kwargs, self.policy, max_turns=rollout.max_turns, timeout_s=rollout.episode_timeout_s
        )

        unsettled = {(plan.name, group.task_id, member) for group, member in missing}

        def store(trajectory: Trajectory) -> None:
            if trajectory.failure is not None and trajectory.failure.kind == ConfigError.kind:
                raise ConfigError(trajectory.failure.message)  # it would fail every episode alike
            sample = int(trajectory.episode_id.split(".")[-2])
            self.log.add(EvalEpisode.of(trajectory, env=plan.name, sample=sample))
            if trajectory.failure is None or trajectory.attempt + 1 >= ATTEMPTS:
                unsettled.discard((plan.name, trajectory.task_id, sample))

        def shown() -> tuple[list[EvalEpisode | None], int]:
            episodes = [None if key in unsettled else self.log.episodes.get(key) for key in plan.keys]
            return episodes, sum(key in self.log.episodes for key in unsettled)

        with EvalProgress(self.console, plan.name, *shown()) as progress:
            try:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(_watch(getattr(sessions, "engine", None)))
                    await play_evaluation(
                        EpisodePlayer(sessions, runner, rollout),
                        missing,
                        store=store,
                        sampling=self.sampling,
                        concurrency=self.request.concurrency,
                        attempts=ATTEMPTS,
                        on_progress=lambda *_: progress.show(*shown()),
                    )
                    watch.cancel()
            except BaseExceptionGroup as error:
                raise first_error(error) from error

    @asynccontextmanager
    async def _sessions(self, *, tools: bool) -> AsyncIterator[Sessions]:
        """Where episodes are sampled: the recorder over an engine that is started here, or an endpoint that answers."""
        async with AsyncExitStack() as stack:
            if self.subject.folder is None:
                yield await self._endpoint(stack)
            else:
                yield await self._recorder(self.subject.folder, stack, tools=tools)

    async def _endpoint(self, stack: AsyncExitStack) -> Sessions:
        from sparring.backend.gateway import Endpoint

        assert self.request.base_url is not None
        name = self.request.api_key_env
        if name not in os.environ and name != EvalRequest.api_key_env:
            raise ConfigError(f"--api-key-env {name}: that environment variable is not set")
        key = os.environ.get(name) or "none"  # servers of one's own often want no key
        endpoint = Endpoint(self.subject.name, base_url=self.request.base_url, api_key=key, sampling=self.sampling)
        stack.push_async_callback(endpoint.aclose)
        await endpoint.check()
        return endpoint

    async def _recorder(self, folder: Path, stack: AsyncExitStack, *, tools: bool) -> Sessions:
        from sparring.backend.compute_type import settle_dtypes
        from sparring.backend.gateway import ChatFormat, Recorder
        from sparring.backend.gateway.http import GatewayServer

        config = settle_dtypes(
            self.subject.config, lambda line: self.console.print(line, highlight=False), of=["engine"]
        )
        chat = ChatFormat.load(
            folder,
            tool_template=config.model.tool_template,
            tool_format=config.model.tool_format,
            history=config.model.history,
            tools=tools,
        )
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparring-eval-"))
        engine = make_engine(config, folder, Path(logs))
        stack.push_async_callback(engine.stop)
        async with asyncio.timeout(_START_TIMEOUT_S):
            await engine.start()
        recorder = Recorder(
            engine,
            chat,
            self.sampling,
            max_length=config.model.max_length,
            aliases=config.agent.model_names,
        )
        stack.push_async_callback(recorder.aclose)
        if config.agent.policy != "native":
            server = GatewayServer(recorder)
            stack.push_async_callback(server.stop)
            await server.start()
        return recorder


async def _watch(engine: Engine | None) -> None:
    """A dead engine ends the evaluation: it would only fail whatever is left of it."""
    missed = 0
    while engine is not None:
        try:
            health = await asyncio.wait_for(engine.health(), 30.0)
            problem = None if health.ok else health.detail or "not healthy"
        except (EngineError, TimeoutError) as error:
            problem = str(error) or "no answer within 30 s"
        missed = missed + 1 if problem else 0
        if missed > _MISSED:  # a busy machine may be late with one answer
            raise EngineError(f"the engine fails: {problem}")
        await asyncio.sleep(_WATCH_S)


def _check(request: EvalRequest) -> None:
    if request.samples < 1 or (request.episodes is not None and request.episodes < 1) or request.concurrency < 1:
        raise ConfigError("--episodes, --k and --concurrency are at least 1")
    if request.overwrite and request.out is None:
        raise ConfigError("--overwrite begins the file of --out anew: name it")
    if request.episodes is not None and request.episodes % request.samples:
        raise ConfigError(
            f"--episodes {request.episodes} is no multiple of --k {request.samples}, the tries of each task"
        )
    if request.temperature is not None and not 0 <= request.temperature < float("inf"):
        raise ConfigError(f"--temperature {request.temperature}: a number from 0 on")
    if request.temperature == 0 and request.samples > 1:
        raise ConfigError(
            f"--k {request.samples} greedy tries of a task differ by rounding at most: raise --temperature"
        )
    names = [env.label for env in request.envs]
    if len(set(names)) < len(names):
        raise ConfigError("an --env is given twice with the same arguments")


def _overrides(request: EvalRequest) -> list[str]:
    """What the options say, in dotted form, behind those that were given as such."""
    overrides = list(request.overrides)
    if request.policy is not None:
        overrides += [f"agent.policy={request.policy}", "agent.kwargs={}"]
    if request.deadline_s is not None:
        overrides.append(f"rollout.episode_timeout_s={float(request.deadline_s)}")
    return overrides


def _sampling(request: EvalRequest, subject: Subject) -> SamplingParams:
    temperature = request.temperature
    if temperature is None:
        temperature = 0.0 if request.samples == 1 else subject.config.sampling.temperature
    # With a seed the embedded engine draws the same numbers for an episode, and in its deterministic mode repeats the
    # evaluation; an endpoint would give each try the same answer.
    seed = None if subject.folder is None else subject.config.seed
    return replace(sampling_params(subject.config), temperature=temperature, seed=seed)


def _settings(request: EvalRequest, subject: Subject, sampling: SamplingParams) -> dict[str, Any]:
    """What must be equal for two halves of an evaluation to be one. It may grow by tasks, tries and environments."""
    config = subject.config
    return {
        "model": subject.name if subject.folder is None else str(subject.folder.resolve()),
        "base_url": request.base_url,
        "split": request.split,
        "seed": config.seed,
        "policy": config.agent.policy,
        "policy_kwargs": config.agent.kwargs,
        "tool_template": config.model.tool_template,
        "max_length": config.model.max_length,
        "max_turns": config.rollout.max_turns,
        "max_episode_tokens": config.rollout.max_episode_tokens,
        **{key: value for key, value in asdict(sampling).items() if key not in ("seed", "top_logprobs")},
    }
