"""A batch that was not trained, written down for inspection: tokens, masks, log-probabilities, advantages. No torch.

One safetensors file, so that reading it runs nothing. All sequences lie end to end in flat arrays; what is no array
is JSON in the file's metadata.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparring.errors import TrainerError
from sparring.types import Group, TokenSequence, Turn

if TYPE_CHECKING:
    from sparring.backend.trainer.packing import Sample

__all__ = ["RejectedBatch", "RejectedSequence", "importance_ratios", "keep_batch", "load_batch"]

_SCHEMA = 1
_OF_TOKENS = ("token_ids", "action_mask", "behaviour_logprobs", "policy_versions")


def importance_ratios(sequence: TokenSequence, logprobs: NDArray[np.floating] | None) -> NDArray[np.float64] | None:
    """ρ of each token, (T,): its probability by `logprobs` over the behaviour policy's; None where those are."""
    if logprobs is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        ratios: NDArray[np.float64] = np.exp(logprobs.astype(np.float64) - sequence.behaviour_logprobs)
    return ratios


@dataclass(frozen=True)
class RejectedSequence:
    """One sequence of the batch. Arrays have length T, and mean something at action tokens alone.

    Attributes:
        advantages: None where the batch was refused before it had any.
        logprobs: what the trainer gave the action tokens; None where it had not come so far.
    """

    episode_id: str
    group_id: str
    env_id: str
    task_id: str
    reward: float | None
    tokens: TokenSequence
    advantages: NDArray[np.float64] | None
    logprobs: NDArray[np.float32] | None

    @property
    def ratios(self) -> NDArray[np.float64] | None:
        """ρ: the trainer's probability of each token over the sampler's."""
        return importance_ratios(self.tokens, self.logprobs)

    def not_finite(self) -> dict[str, list[int]]:
        """By what it is, the action tokens whose value is not finite."""
        values = {
            "behaviour log p": self.tokens.behaviour_logprobs,
            "log p": self.logprobs,
            "ratio": self.ratios,
            "advantage": self.advantages,
        }
        odd = {
            name: np.flatnonzero(self.tokens.action_mask & ~np.isfinite(array)).tolist()
            for name, array in values.items()
            if array is not None
        }
        return {name: where for name, where in odd.items() if where}


@dataclass(frozen=True)
class RejectedBatch:
    """Attributes: `problem` says why it was refused; `record` holds the step's metrics as far as they were known."""

    step: int
    problem: str
    record: Mapping[str, Any]
    sequences: tuple[RejectedSequence, ...]


def keep_batch(
    run_dir: Path,
    problem: str,
    record: Mapping[str, Any],
    groups: Sequence[Group],
    samples: Sequence[Sample],
    scored: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]],
    *,
    write: bool = True,
) -> str:
    """Write a batch into the run's folder, atomically; gives what to tell the user, whatever comes of it.

    Args:
        record: the step's metrics so far, its number among them.
        samples: what `make_step` made of the groups, or nothing where it refused them.
        scored: by index of the sample, positions and log-probabilities of its action tokens.
        write: False on ranks that do not.
    """
    path = run_dir / f"rejected-batch-{record['step']}.safetensors"
    if write:
        try:
            _save(path, problem, record, groups, samples, scored)
        except OSError as error:
            return f"the batch could not be written to {path}: {error}"
    return f"the batch: sparring view --batch {path}"


def _save(
    path: Path,
    problem: str,
    record: Mapping[str, Any],
    groups: Sequence[Group],
    samples: Sequence[Sample],
    scored: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]],
) -> None:
    about: list[dict[str, Any]] = []
    arrays: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_OF_TOKENS, "advantages", "logprobs")}
    index = 0
    for trajectory in (t for group in groups for t in group.survivors):
        for sequence in trajectory.sequences:
            sample = None
            if sequence.action_mask.any():
                sample = samples[index] if index < len(samples) else None
                index += 1
            positions, values = scored.get(index - 1, (None, None)) if sample is not None else (None, None)
            logprobs = np.full(len(sequence), np.nan, np.float32)
            if positions is not None:
                logprobs[positions] = values
            about.append(
                {
                    "episode_id": trajectory.episode_id,
                    "group_id": trajectory.group_id,
                    "env_id": trajectory.env_id,
                    "task_id": trajectory.task_id,
                    "reward": trajectory.reward,
                    "length": len(sequence),
                    "turns": [dataclasses.asdict(turn) for turn in sequence.turns],
                    "has_advantages": sample is not None,
                    "has_logprobs": positions is not None,
                }
            )
            for name in _OF_TOKENS:
                arrays[name].append(getattr(sequence, name))
            arrays["advantages"].append(np.zeros(len(sequence)) if sample is None else sample.advantages)
            arrays["logprobs"].append(logprobs)
    document = {
        "schema": _SCHEMA,
        "step": record["step"],
        "problem": problem,
        "record": dict(record),
        "sequences": about,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    flat = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in arrays.items()}
    save_file(flat, partial, metadata={"batch": json.dumps(document)})  # NaN among it: read by `json` as written
    os.replace(partial, path)


def load_batch(path: Path) -> RejectedBatch:
    """
    Raises:
        TrainerError: there is no such file, or it is damaged or something else.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            document = json.loads((file.metadata() or {})["batch"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}, this version reads {_SCHEMA}")
        sequences, start = [], 0
        for about in document["sequences"]:
            part = slice(start, start := start + about["length"])
            sequences.append(_sequence(about, {name: array[part] for name, array in arrays.items()}))
    except OSError as error:
        raise TrainerError(f"cannot read the batch {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{path} is no batch that a run rejected, or it is damaged: {error!r}") from error
    return RejectedBatch(document["step"], document["problem"], document["record"], tuple(sequences))


def _sequence(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> RejectedSequence:
    tokens = {name: arrays[name] for name in _OF_TOKENS}
    return RejectedSequence(
        **{name: about[name] for name in ("episode_id", "group_id", "env_id", "task_id", "reward")},
        tokens=TokenSequence(**tokens, turns=tuple(Turn(**turn) for turn in about["turns"])),
        advantages=arrays["advantages"] if about["has_advantages"] else None,
        logprobs=arrays["logprobs"] if about["has_logprobs"] else None,
    )
