"""Does a server hold what it was sent? Compares checksums of the trainer's tensors with those of the server's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.transport import Transport
from sparring.backend.engines.sglang.checksum import ACTION, parameter_checksums
from sparring.errors import EngineError

__all__ = [
    "STACKED",
    "CannotTell",
    "Checksums",
    "Comparison",
    "WeightsDiffer",
    "compare",
    "folder_checksums",
    "held_checksums",
]

Checksums = Mapping[str, tuple[int, str]]
"""Checksum and type by parameter, as `parameter_checksums` gives them."""

# SGLang's models stack these on each other. A name that is not here is the same on both sides.
STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class WeightsDiffer(EngineError):
    """A server holds other weights than it was sent."""


class CannotTell(EngineError):
    """A server does not say what weights it holds."""


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        wrong: the server's parameters that differ, with ours that are in them.
        unknown: ours that cannot be compared: the server holds them by another name, or in another type.
    """

    wrong: tuple[str, ...]
    unknown: tuple[str, ...]


def compare(sent: Checksums, held: Checksums) -> Comparison:
    """What differs between what was sent and what a server holds. What it holds besides is its own."""
    parts: dict[str, list[str]] = {}
    for name in sent:
        parts.setdefault(name if name in held else _stacked(name), []).append(name)
    wrong, unknown = [], []
    for name, ours in parts.items():
        if name not in held or any(sent[part][1] != held[name][1] for part in ours):
            unknown += ours
        elif (sum(sent[part][0] for part in ours) - held[name][0]) % 2**64:
            wrong.append(name if ours == [name] else f"{name} ({', '.join(ours)})")
    return Comparison(tuple(wrong), tuple(unknown))


def folder_checksums(folder: Path, layout: WeightLayout) -> Checksums:
    """Those of the weights in a folder, in the layout's type."""

    def named() -> Iterator[tuple[str, Tensor]]:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    if name in layout.shapes:
                        yield name, tensors.get_tensor(name).to(getattr(torch, layout.dtype))

    return parameter_checksums(named())


async def held_checksums(transport: Transport, *, deadline_s: float) -> Checksums:
    """Those of a server's parameters now.

    Raises:
        CannotTell: a server that `launcher.py` did not start, or that failed at it.
        EngineError: no server answers.
    """
    answer: Any = await transport.post("/weights_checker", {"action": ACTION}, deadline_s=deadline_s)
    try:
        if not answer["success"]:
            raise CannotTell(str(answer["message"])[:500])
        held: dict[str, list[Any]] = json.loads(answer["message"])
        return {name: (int(value), str(kind)) for name, (value, kind) in held.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotTell(f"it answered {str(answer)[:200]}") from error


def _stacked(name: str) -> str:
    return ".".join(STACKED.get(part, part) for part in name.split("."))
