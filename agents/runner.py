"""The episode runner: makes the environment, lets a policy play, and turns whatever happens into an `EpisodeResult`."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from sparring.agents.env_names import refuse_file, spelt_right
from sparring.agents.policy import Outcome, Policy
from sparring.envs import ChatEnv
from sparring.errors import AgentError, BudgetExhausted, ConfigError, SparringError, described
from sparring.extras import lacking
from sparring.plugins import load_module
from sparring.spelling import did_you_mean
from sparring.types import ChatClient, EpisodeResult, EpisodeSpec, Failure, RunEpisode, StopReason

__all__ = ["make_env", "make_runner"]


_CLOSE_TIMEOUT_S = 60.0
_log = logging.getLogger(__name__)


def make_env(env_id: str, env_kwargs: Mapping[str, Any]) -> ChatEnv:
    """A bare `ChatEnv`, without Gymnasium's wrappers, which know no `astep`.

    Raises:
        ConfigError: no such id (Gymnasium names the nearest), wrong arguments, not one of our environments, or a module
            in the id that cannot be imported.
    """
    refuse_file(env_id)
    module, separator, _ = env_id.rpartition(":")
    if separator:
        load_module(module, "env.id")  # which Gymnasium does, too, but without a word about where it broke
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **env_kwargs).unwrapped
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        if isinstance(error, TypeError):
            _check_arguments(env_id, env_kwargs)
        why = lacking(error) or str(error)
        if isinstance(error, gymnasium.error.UnregisteredEnv):
            why = why.rstrip(".") + spelt_right(env_id)
        raise ConfigError(f"cannot make environment {env_id!r} with {dict(env_kwargs)}: {why}") from error
    if not isinstance(env, ChatEnv):
        raise ConfigError(f"environment {env_id!r} is a {type(env).__name__}, not a sparring.envs.ChatEnv")
    return env


def _check_arguments(env_id: str, env_kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError where the environment's constructor takes no argument of one of these names."""
    creator: Any = gymnasium.spec(env_id.rpartition(":")[2]).entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    if not (isinstance(creator, type) and issubclass(creator, ChatEnv)):
        return
    known: list[str] = []
    for base in creator.__mro__[: creator.__mro__.index(ChatEnv) + 1]:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        own = list(inspect.signature(constructor).parameters.values())[1:]
        known += [p.name for p in own if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in known]
        if all(p.kind is not p.VAR_KEYWORD for p in own):
            break  # it hands nothing on to its bases
    for name in env_kwargs:
        if name not in known:
            raise ConfigError(
                f"environment {env_id!r} takes no {name!r}{did_you_mean(name, known) or '.'} "
                f"It takes {', '.join(known)}"
            )


def make_runner(
    env_id: str, env_kwargs: Mapping[str, Any], policy: Policy, *, max_turns: int | None = None, timeout_s: float
) -> RunEpisode:
    """A callable that plays one episode and never raises but for its own cancellation.

    Args:
        max_turns: caps the environment's own turn budget.
        timeout_s: wall-clock deadline of the whole episode, set-up included. Past it the episode is a failure, since
            a slow sampler must not turn a good episode into a bad one.
    """

    async def run_episode(spec: EpisodeSpec, client: ChatClient) -> EpisodeResult:
        env: ChatEnv | None = None
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                env = make_env(env_id, env_kwargs)
                if max_turns is not None:
                    env.max_turns = min(env.max_turns, max_turns)
                await env.areset(seed=spec.seed, options={"task_id": spec.task_id})
                outcome = await _play(policy, env, client)
            if deadline.expired():  # the agent swallowed its cancellation
                raise TimeoutError
            return _result(env, outcome)
        except Exception as error:
            if deadline.expired():
                limit = f"rollout.episode_timeout_s={timeout_s:g}, waits for the engine among it"
                return _failed(StopReason.DEADLINE, Failure("deadline", f"{_where(spec)}: no end within {limit}"))
            return _failed(StopReason.FAILED, _failure(error, spec, env))
        finally:
            if env is not None:
                await _close(env, spec)

    return run_episode


async def _play(policy: Policy, env: ChatEnv, client: ChatClient) -> Outcome:
    try:
        return await policy.play(env, client)
    except BudgetExhausted as error:
        env.truncate(StopReason(error.stop_reason))
        return Outcome(env.stop_reason or StopReason.ABORTED)
    except SparringError:
        raise
    except Exception as error:
        if env.failure is not None:
            raise  # the environment broke under the agent
        raise AgentError(f"{type(policy).__name__} raised {described(error)}") from error


def _result(env: ChatEnv, outcome: Outcome) -> EpisodeResult:
    failure = env.failure or outcome.failure
    if failure is not None:
        return _failed(StopReason.FAILED, failure)
    if not env.done and outcome.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
        env.truncate(outcome.stop_reason)
    if env.stop_reason is None:
        raise AgentError(f"the agent ended ({outcome.stop_reason}) and left the episode open: it handed in no answer")
    return EpisodeResult(
        env.stop_reason, env.reward, reward_parts=dict(env.reward_parts), turn_rewards=tuple(env.turn_rewards)
    )


def _failure(error: Exception, spec: EpisodeSpec, env: ChatEnv | None) -> Failure:
    if env is not None and env.failure is not None:
        return env.failure
    if not isinstance(error, SparringError):
        _log.error("%s died of a bug", _where(spec), exc_info=error)
        return Failure("internal", f"{_where(spec)}: {described(error)}")
    return Failure(error.kind, f"{_where(spec)}: {error}")


def _failed(reason: StopReason, failure: Failure) -> EpisodeResult:
    return EpisodeResult(reason, failure=failure)


async def _close(env: ChatEnv, spec: EpisodeSpec) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await env.aclose()
    except Exception:
        _log.exception("%s: its environment did not close", _where(spec))


def _where(spec: EpisodeSpec) -> str:
    return f"episode {spec.episode_id} (task {spec.task_id} of {spec.env_id})"
