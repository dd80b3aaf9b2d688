"""What `sparring eval MODEL` means by MODEL: a folder, a run, a run's checkpoint, or a name behind an endpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.config import RunConfig
from sparring.config_file import load_config, make_config
from sparring.errors import ConfigError
from sparring.run_dir import RunDirectory

__all__ = ["Subject", "find_subject"]

_LONGEST = 4096
_SYNCHRONOUS = "rollout.staleness=0"  # nothing is trained: else engine.deterministic would want it said each time
# Without a run's budgets an episode has the environment's own.
_BUDGETS = {"max_turns": 1_000_000, "max_episode_tokens": 1_000_000_000}


@dataclass(frozen=True)
class Subject:
    """A model and how it is sampled.

    Attributes:
        folder: the Hugging Face folder; None where an endpoint serves the model.
    """

    name: str
    config: RunConfig
    folder: Path | None


def find_subject(model: str, env_id: str, overrides: Sequence[str], *, remote: bool) -> Subject:
    """
    Args:
        env_id: of the first environment, or "": that of the run which trained the model.
        overrides: dotted, over the run's configuration or the defaults.
        remote: `model` is a name behind an endpoint.

    Raises:
        ConfigError: no such model, or a run without one yet; no environment, and no run that could say it.
    """
    overrides = [_SYNCHRONOUS, *overrides]
    if remote:
        _require(env_id, f"with --base-url, {model} is a name that the endpoint serves, and no run")
        document = _document(model, env_id, max_length=1 << 20, max_new_tokens=4096)
        return Subject(model, make_config(document, overrides, name="eval").config, None)
    from sparring.backend.models import resolve_model

    path = Path(model).expanduser()
    for root in (path, path.parent):
        run = RunDirectory(root)
        if path.is_dir() and run.config.is_file() and run.buffer.is_file():
            folder = run.newest_model if root == path else path
            if folder is None:
                raise ConfigError(f"the run in {root} has no model yet: wait for its first checkpoint")
            return Subject(str(folder), load_config(run.config, overrides).config, resolve_model(str(folder)))
    _refuse_missing(model, path)
    folder = resolve_model(model)
    _require(env_id, f"{model} is no run")
    max_length = _context_length(folder)
    document = _document(model, env_id, max_length=max_length, max_new_tokens=min(1024, max_length // 2))
    return Subject(model, make_config(document, overrides, name="eval").config, folder)


def _refuse_missing(model: str, path: Path) -> None:
    """Before the hub is asked: what looks like a path here is not a model there."""
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise ConfigError(
                f"{model} is neither a run (it lacks config.yaml or buffer.sqlite) nor a model (it lacks config.json)"
            )
    elif path.exists():
        raise ConfigError(f"{model} is a file; a run's folder or a model's folder is wanted")
    elif "/" in model and (path.is_absolute() or model.count("/") != 1 or model[0] in "./~" or _is_local(path)):
        there = sorted(f.name for f in path.parent.iterdir() if f.is_dir())[:10] if path.parent.is_dir() else []
        beside = f"; {path.parent} holds {', '.join(there)}" if there else ""
        raise ConfigError(f"there is no folder {path.absolute()}: neither a run nor a model{beside}")


def _is_local(path: Path) -> bool:
    """Whether A/B is a path rather than a hub's organisation and model: runs stand in `runs`."""
    return path.parts[0] == "runs" or path.parent.is_dir()


def _require(env_id: str, why: str) -> None:
    if not env_id:
        raise ConfigError(f"--env is needed: {why}, whose own environment it could be")


def _document(model: str, env_id: str, *, max_length: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "model": {"path": model, "max_length": max_length},
        "env": {"id": env_id},
        "rollout": _BUDGETS,
        "sampling": {"max_new_tokens": max_new_tokens},
    }


def _context_length(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return min(length or _LONGEST, _LONGEST)
