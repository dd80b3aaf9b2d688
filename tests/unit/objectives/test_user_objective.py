"""An objective in a file of the user's: the shipped examples, and every way in which such a file can be wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sparring.backend.objectives import load_objective
from sparring.errors import ConfigError
from sparring.types import Group, StopReason, TokenSequence, Trajectory, Turn

IMPORTS = """from dataclasses import replace
from sparring.backend.objectives import load_objective
grpo, m2po, ppo = (lambda name=name: load_objective(name, {}) for name in ("grpo", "m2po", "ppo"))
"""
EXAMPLES = Path(__file__).parents[3] / "examples" / "algorithms"


def group(*rewards):
    sequence = TokenSequence([1, 2], [False, True], [0.0, -1.0], [-1, 0], (Turn(1, 2),))
    ended = StopReason.FINISHED
    episodes = (Trajectory(f"e{i}", "g", "env", "t", 0, (sequence,), r, ended) for i, r in enumerate(rewards))
    return Group("g", tuple(episodes))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda f: f.stem)
def test_an_example_is_short_and_pulls_towards_what_was_better(kit, file):
    assert len(file.read_text().splitlines()) <= 60
    objective = load_objective(f"{file}:{file.stem}", {})
    (credits,) = objective.advantage([group(0.0, 0.0, 1.0)])
    assert np.concatenate(credits)[2] > np.concatenate(credits)[0]
    x = kit.make_inputs(drift=0.0, advantages=torch.ones(18, dtype=torch.float64))
    assert (kit.gradient(objective.loss, x) < 0).all()


def test_success_only_learns_nothing_from_failures(kit):
    objective = load_objective(f"{EXAMPLES / 'success_only.py'}:success_only", {"cap": 1.5})
    (credits,) = objective.advantage([group(0.0, 1.0, 1.0, 0.0)])
    assert np.concatenate(credits).tolist() == [0.0, 0.5, 0.5, 0.0]


def test_a_users_objective_takes_overrides_of_its_parts():
    objective = load_objective(f"{EXAMPLES / 'asymmetric_clip.py'}:asymmetric_clip", {"advantage": "rloo", "wide": 0.9})
    (credits,) = objective.advantage([group(0.0, 1.0)])
    assert np.concatenate(credits).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("def mine(:\n    pass\n", "SyntaxError"),
        ("import nowhere_to_be_found\n", "nowhere_to_be_found"),
        ("def other():\n    pass\n", "defines no 'mine'; it defines other"),
        ("def mine():\n    return 3\n", "returned int, not an Objective"),
        ("def mine(a):\n    return 3\n", "missing 1 required positional argument"),
        (f"{IMPORTS}def mine():\n    return replace(grpo(), prepare=print)\n", "set needs_proximal=True too"),
        (f"{IMPORTS}def mine():\n    return replace(m2po(), critic=ppo().critic)\n", "use one of the two"),
    ],
)
def test_a_file_with_an_error_is_refused_before_anything_starts(tmp_path, content, says):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_objective(f"{tmp_path / 'mine.py'}:mine", {})


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*absent\.py"):
        load_objective(f"{tmp_path / 'absent.py'}:mine", {})
