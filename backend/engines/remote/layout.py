"""Names and shapes of a model's tensors, which every update of a server's weights is checked against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from sparring.errors import EngineError

__all__ = ["WeightLayout"]


@dataclass(frozen=True)
class WeightLayout:
    """Names and shapes of a model's tensors, as its folder says. A tied head is not a tensor of its own.

    Attributes:
        folder: where the configuration lies, which a folder of new weights needs too.
    """

    folder: Path
    architecture: str
    dtype: str
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of_model(cls, folder: Path) -> WeightLayout:
        """
        Raises:
            EngineError: `folder` is no Hugging Face folder with safetensors.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            index = folder / "model.safetensors.index.json"
            files = {"model.safetensors"}
            if index.exists():
                files = set(json.loads(index.read_text())["weight_map"].values())
            shapes: dict[str, tuple[int, ...]] = {}
            for file in sorted(files):
                with safe_open(folder / file, framework="np") as tensors:
                    shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"{folder} is no model folder with config.json and safetensors: {error}") from error
        tied = bool(config.get("tie_word_embeddings"))
        if tied:
            shapes.pop("lm_head.weight", None)
        return cls(folder, config["architectures"][0], config.get("dtype", "bfloat16"), tied, shapes)

    @property
    def parameters(self) -> int:
        total = 0
        for shape in self.shapes.values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total

    def check(self, given: Mapping[str, tuple[int, ...]]) -> None:
        """
        Raises:
            EngineError: a tensor is missing, unknown or of another shape. (Servers would skip it in silence.)
        """
        missing, unknown = sorted(self.shapes.keys() - given.keys()), sorted(given.keys() - self.shapes.keys())
        if missing == ["lm_head.weight"]:
            raise EngineError(
                "the new weights have no lm_head.weight, since the trained model ties it to the embedding, but the "
                f"sampled model {self.folder} does not: set tie_word_embeddings alike in both"
            )
        if missing or unknown:
            raise EngineError(
                f"the new weights are not the named_parameters() of {self.folder}: missing {_some(missing)}, unknown "
                f"{_some(unknown)}"
            )
        for name, shape in given.items():
            if shape != self.shapes[name]:
                raise EngineError(
                    f"the new weights do not fit {self.folder}: {name} has shape {list(shape)}, expected "
                    f"{list(self.shapes[name])}"
                )


def _some(names: list[str]) -> str:
    return f"{names[:3]} and {len(names) - 3} more" if len(names) > 3 else str(names)
