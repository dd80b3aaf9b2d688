"""Named tensors in memory that two processes share, so that new weights cross over at the speed of a copy."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from sparring.errors import EngineError

__all__ = ["SharedWeights", "open_shared_file"]

_ALIGNMENT = 64


def open_shared_file() -> int:
    """A file descriptor to inherit. The file has no name: it goes when both processes are gone, however they go."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sparring-weights")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())


class SharedWeights:
    """A model's parameters in shared memory, laid out by their names' order. One side writes, then the other reads."""

    def __init__(self, descriptor: int, shapes: Mapping[str, tuple[int, ...]], tied: Iterable[str],
                 dtype: torch.dtype) -> None:  # fmt: skip
        """Both sides give the same shapes and type. `tied`: names that a source may have and that are not needed."""
        self._tied = frozenset(tied)
        offsets = {}
        end = 0
        for name in sorted(shapes):
            offsets[name] = end
            size = torch.Size(shapes[name]).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if os.fstat(descriptor).st_size < end:
            os.ftruncate(descriptor, end)
        memory = torch.frombuffer(mmap.mmap(descriptor, end), dtype=torch.uint8)
        self._tensors = {
            name: memory[offset : offset + torch.Size(shapes[name]).numel() * dtype.itemsize]
            .view(dtype)
            .view(shapes[name])
            for name, offset in offsets.items()
        }

    @torch.no_grad()
    def write(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of any floating type from any device.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs. What was written then must not be read.
        """
        missing = set(self._tensors)
        for name, tensor in source:
            target = self._tensors.get(name)
            if target is None:
                if name in self._tied:
                    continue
                raise EngineError(
                    f"new weights have a tensor {name!r} that the engine's model lacks: names are those of "
                    "named_parameters() of its AutoModelForCausalLM. The old weights stay"
                )
            if tensor.shape != target.shape:
                raise EngineError(
                    f"new weights for {name} have shape {tuple(tensor.shape)}, the model's have {tuple(target.shape)}: "
                    "they are of another model. The old weights stay"
                )
            target.copy_(tensor)
            missing.discard(name)
        if missing:
            raise EngineError(
                f"new weights lack {len(missing)} tensors, such as {min(missing)!r}: give all of them at once. "
                "The old weights stay"
            )

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors themselves, not copies."""
        yield from self._tensors.items()
