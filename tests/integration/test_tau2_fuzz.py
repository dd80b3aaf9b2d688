"""Any sequence of tool calls leaves our copy-on-write world where it leaves upstream's environment.

The calls are gold actions of all tasks of a domain, mixed, some with an argument of another: often enough they are
valid, and write.
"""

from __future__ import annotations

import importlib
import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("tau2", reason="needs the extra tau2")

from sparring.envs.tau2.domain import load_domain
from sparring.envs.tau2.world import World, same_state

pytestmark = pytest.mark.slow
Step = tuple[str, dict[str, Any], str]


def some_calls(domain: str, rng: random.Random, count: int) -> list[Step]:
    loaded = load_domain(domain)
    tasks = [loaded.task(task_id) for task_id in loaded.splits["base"]]
    actions = [action for task in tasks for action in task.evaluation_criteria.actions or ()]
    steps: list[Step] = []
    for _ in range(count):
        action, other = rng.choice(actions), rng.choice(actions)
        arguments = dict(action.arguments)
        if arguments and other.arguments and rng.random() < 0.3:
            arguments[rng.choice(sorted(arguments))] = rng.choice(list(other.arguments.values()))
        steps.append((action.name, arguments, action.requestor))
    return steps


def upstream_environment(domain: str, task: Any) -> Any:
    environment = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment()
    state = task.initial_state
    if state is not None:
        environment.set_state(state.initialization_data, state.initialization_actions, [])
    return environment


def run_upstream(environment: Any, steps: list[Step]) -> list[tuple[str, bool]]:
    from tau2.data_model.message import ToolCall

    said = []
    for name, arguments, requestor in steps:
        answer = environment.get_response(ToolCall(id="c", name=name, arguments=arguments, requestor=requestor))
        said.append((answer.content, answer.error))
    return said


def dumped(environment: Any) -> str:
    """Both databases as upstream hashes them; the ids that it draws at random are masked."""
    kits = [kit for kit in (environment.tools, environment.user_tools) if kit is not None]
    text = json.dumps([kit.db.model_dump() for kit in kits], sort_keys=True, default=str)
    return re.sub(r"\bB[0-9a-f]{8}\b", "B", text)


def masked(said: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(re.sub(r"\bB[0-9a-f]{8}\b", "B", text), error) for text, error in said]


@pytest.mark.filterwarnings("ignore::UserWarning")  # pydantic, of values of the wrong type that upstream stores
@pytest.mark.parametrize(("domain", "rounds"), [("mock", 20), ("telecom", 40), ("retail", 4), ("airline", 3)])
def test_any_calls_end_where_upstreams_end(domain: str, rounds: int) -> None:
    rng = random.Random(f"fuzz {domain}")
    loaded = load_domain(domain)
    for _ in range(rounds):
        task = loaded.task(rng.choice(loaded.splits["base"]))
        if task.initial_state is not None and task.initial_state.message_history:
            continue
        steps = some_calls(domain, rng, rng.randint(1, 40))
        environment, world = upstream_environment(domain, task), loaded.start(task).world("fuzz")
        ours = [world.respond(name, arguments, requestor) for name, arguments, requestor in steps]  # type: ignore[arg-type]
        assert masked(ours) == masked(run_upstream(environment, steps))
        assert dumped(world.environment) == dumped(environment)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("domain", "rounds"), [("mock", 60), ("telecom", 80), ("retail", 25), ("airline", 15)])
def test_states_are_equal_exactly_where_upstreams_hashes_are(domain: str, rounds: int) -> None:
    rng = random.Random(f"equal {domain}")
    loaded = load_domain(domain)
    outcomes = []
    for _ in range(rounds):
        task = loaded.task(rng.choice(loaded.splits["base"]))
        steps = some_calls(domain, rng, rng.randint(1, 8))
        others = list(steps)
        if rng.random() < 0.5:
            rng.shuffle(others)
        if rng.random() < 0.5:
            others.pop()
        one, other = (loaded.start(task).world("the same ids") for _ in range(2))
        for world, played in ((one, steps), (other, others)):
            for name, arguments, requestor in played:
                world.respond(name, arguments, requestor)  # type: ignore[arg-type]
        hashes = [(w.environment.get_db_hash(), w.environment.get_user_db_hash()) for w in (one, other)]
        assert same_state(one, other) == (hashes[0] == hashes[1])
        outcomes.append(hashes[0] == hashes[1])
    assert {True, False} <= set(outcomes)


def test_worlds_of_one_start_do_not_share_what_they_write() -> None:
    loaded = load_domain("airline")
    start = loaded.start(loaded.task(loaded.splits["base"][0]))
    rng = random.Random(3)
    untouched = dumped(start.world("").environment)
    for _ in range(3):
        world = start.world("")
        for name, arguments, requestor in some_calls("airline", rng, 30):
            world.respond(name, arguments, requestor)  # type: ignore[arg-type]
    assert dumped(start.world("").environment) == untouched
    assert dumped(World(loaded.environment).environment) == untouched
