"""A domain of τ²-bench, loaded once for the process: database, tasks, splits, policy, tools, prompts.

Everything is upstream's, read from the package `tau2`. The prompts stand in modules of upstream's that import a client
library and look for its price list on the network, so they are read from the source instead of imported.
"""

from __future__ import annotations

import ast
import importlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparring.envs.tau2.world import World, seed_ids
from sparring.errors import ConfigError, TaskError
from sparring.extras import install_command

__all__ = ["DOMAINS", "Domain", "load_domain", "quiet"]

DOMAINS = ("airline", "retail", "telecom", "mock")
FIRST_MESSAGE = "Hi! How can I help you today?"  # the orchestrator's
_KEPT_STATES = 256


@dataclass
class Domain:
    """One domain, with or without solo mode. Tasks and environments are upstream's objects; none may be changed."""

    name: str
    solo: bool
    environment: Any
    splits: Mapping[str, Sequence[str]]
    _module: Any = field(repr=False)
    _tasks: dict[str, Any] = field(repr=False)
    _states: OrderedDict[str, _Start] = field(default_factory=OrderedDict, repr=False)

    def task_ids(self, split: str) -> tuple[str, ...]:
        """`<split>/<upstream's id>`; none where the domain lacks the split.

        The mock domain has no train and test: its test tasks are all of them, its train tasks those with gold actions.
        """
        if split in self.splits or self.name != "mock" or split not in ("train", "test"):
            return _prefixed(split, tuple(self.splits.get(split, ())))
        ids = self.splits["base"]
        return _prefixed(split, tuple(i for i in ids if split == "test" or self.task(i).evaluation_criteria.actions))

    def task(self, task_id: str) -> Any:
        """Upstream's `Task`.

        Raises:
            TaskError: no such task.
        """
        if task_id not in self._tasks:  # telecom keeps 2,285 tasks, of which its usual splits name 114
            self._tasks.update((task.id, task) for task in self._module.get_tasks(None))
        try:
            return self._tasks[task_id]
        except KeyError:
            some = ", ".join(list(self._tasks)[:3])
            raise TaskError(f"the domain {self.name} has no task {task_id!r}; it has {some}, ...") from None

    def start(self, task: Any) -> _Start:
        """The starting state of a task, kept for the other members of its group.

        Raises:
            TaskError: the task's initial state does not replay.
        """
        state = self._states.get(task.id)
        if state is None:
            state = self._states[task.id] = _Start(self, task)
            if len(self._states) > _KEPT_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(task.id)
        return state

    def with_task(self, task: Any) -> Domain:
        """This domain with a task of one's own in the place of the one of the same id."""
        return replace(self, _tasks={**self._tasks, task.id: task}, _states=OrderedDict())

    def fresh_start(self, task: Any) -> _Start:
        """The starting state of a task that is not the domain's own, such as a results file's copy; it is not kept."""
        return _Start(self, task)

    @cached_property
    def agent_tools(self) -> list[dict[str, Any]]:
        """OpenAI schemas of the agent's tools; in solo mode the user's too, and `done`."""
        tools = self.environment.get_tools()
        if self.solo and self.environment.user_tools is not None:
            tools += self.environment.get_user_tools()
        return [tool.openai_schema for tool in tools] + ([_DONE] if self.solo else [])

    @cached_property
    def user_tools(self) -> list[dict[str, Any]]:
        """OpenAI schemas of the user's tools; telecom's user has some."""
        if self.environment.user_tools is None:
            return []
        return [tool.openai_schema for tool in self.environment.get_user_tools()]

    def agent_prompt(self, task: Any) -> str:
        """The agent's system message: instructions and policy; in solo mode the ticket too."""
        if not self.solo:
            return self._policy_prompt
        instruction = _constant("tau2.agent.llm_agent", "AGENT_SOLO_INSTRUCTION").format(
            stop_function_name="done", stop_token="###STOP###"
        )
        return _constant("tau2.agent.llm_agent", "SYSTEM_PROMPT_SOLO").format(
            agent_instruction=instruction, domain_policy=self.environment.get_policy(), ticket=task.ticket
        )

    @cached_property
    def _policy_prompt(self) -> str:
        return _constant("tau2.agent.llm_agent", "SYSTEM_PROMPT").format(
            domain_policy=self.environment.get_policy(),
            agent_instruction=_constant("tau2.agent.llm_agent", "AGENT_INSTRUCTION"),
        )

    def user_prompt(self, task: Any) -> str:
        """The user simulator's system message: upstream's guidelines and the task's scenario."""
        file = "simulation_guidelines_tools.md" if self.user_tools else "simulation_guidelines.md"
        return _constant("tau2.user.user_simulator", "SYSTEM_PROMPT").format(
            global_user_sim_guidelines=_guidelines(file),
            instructions=str(task.user_scenario),
        )


class _Start:
    """A task's starting state, and the end state of its gold actions, computed when first asked for."""

    def __init__(self, domain: Domain, task: Any) -> None:
        self._task = task
        self._domain = domain
        self._environment = _initialised(domain.environment, task, domain.name)

    def world(self, seed: str) -> World:
        return World(self._environment, seed=seed)

    @cached_property
    def gold(self) -> World:
        """The state after the gold actions, in an environment that is never solo, as upstream's evaluator has it."""
        if self._domain.solo:
            return load_domain(self._domain.name).fresh_start(self._task).gold
        world = World(self._environment, seed="gold")
        world.replay_gold(self._task.evaluation_criteria.actions or [])
        return world


def _initialised(environment: Any, task: Any, domain: str) -> Any:
    state = task.initial_state
    if state is None:
        return environment
    forked = World(environment).environment
    try:
        forked.set_state(
            initialization_data=state.initialization_data,
            initialization_actions=state.initialization_actions,
            message_history=state.message_history or [],
        )
    except Exception as error:
        raise TaskError(f"the initial state of task {task.id!r} of {domain} cannot be set: {error}") from error
    return forked


@cache
def load_domain(name: str, solo: bool = False) -> Domain:
    """Load a domain, once for the process.

    Raises:
        ConfigError: the package is not installed, no such domain, or one without solo mode.
    """
    if name not in DOMAINS:
        raise ConfigError(f"no τ²-bench domain {name!r}; there are {', '.join(DOMAINS)}")
    try:
        quiet()
        module = importlib.import_module(f"tau2.domains.{name}.environment")
        tools_module = importlib.import_module(f"tau2.domains.{name}.tools")
    except ImportError as error:
        raise ConfigError(f"τ²-bench cannot be imported ({error}): {install_command(['tau2'])}") from error
    try:
        environment = module.get_environment(solo_mode=solo)
    except ValueError as error:
        raise ConfigError(f"{error} (solo=True)") from error
    seed_ids(tools_module)
    splits = module.get_tasks_split()
    tasks = {task.id: task for task in module.get_tasks("base" if "base" in splits else None)}
    return Domain(name, solo, World(environment).environment, splits, module, tasks)


def quiet() -> None:
    """Upstream logs every tool call of every episode at debug level, to standard error, unless told otherwise."""
    from loguru import logger

    logger.disable("tau2")


@cache
def _constant(module: str, name: str) -> str:
    """A string constant of a module, read from its source: `NAME = "..."`, or `NAME = "...".strip()`."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ConfigError(f"the installed tau2 has no module {module}; sparring needs one that has")
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            match node.value:
                case ast.Constant(value=str() as text):
                    return text
                case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="strip"), args=[]):
                    return text.strip()
    raise ConfigError(f"the installed tau2 has no constant {name} in {module}; sparring needs one that has")


@cache
def _guidelines(file: str) -> str:
    from tau2.utils.utils import DATA_DIR

    return (Path(DATA_DIR) / "tau2" / "user_simulator" / file).read_text()


@cache
def _prefixed(split: str, ids: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{split}/{task_id}" for task_id in ids)


_DONE = {
    "type": "function",
    "function": {
        "name": "done",
        "description": "Call this function when you are done with the task.",
        "parameters": {"properties": {}, "title": "parameters", "type": "object"},
    },
}
