"""An update's tensors, copied piece by piece into buffers that a server can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.sglang.checksum import parameter_checksums
from sparring.errors import EngineError

__all__ = ["Bucket", "BucketStager"]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some of an update's tensors, side by side in one buffer.

    Attributes:
        views: names, and tensors that are parts of `buffer`, in its order.
        buffer: uint8 `[bytes]`, the filled part alone.
        last: nothing comes after it.
    """

    views: tuple[tuple[str, Tensor], ...]
    buffer: Tensor
    last: bool


class BucketStager:
    """Copies tensors, cast to the layout's type, into one buffer or two, which it keeps from version to version.

    A model of at most `limit` bytes is one bucket: all of it is copied before the pause, which is then one load and as
    short as can be, at the price of a second copy of the model. A larger one goes through two buffers of half the
    limit in turn: the first bucket is copied before the pause, each further one while the server loads the bucket
    before it. Memory is then `limit` however large the model (two of its largest tensor, if that is more), and the
    pause is as long as the slower of copying and loading takes for the whole model. Each server has a stager of its
    own.
    """

    def __init__(self, layout: WeightLayout, limit: int, *, alignment: int) -> None:
        """
        Args:
            limit: bytes.
            alignment: of each tensor in its buffer, in bytes.
        """
        self._layout, self._alignment, self._takes_checksums = layout, alignment, False
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        sizes = [self._aligned(shape) for shape in layout.shapes.values()]
        self._buffers: list[Tensor | None] = [None]
        self._capacity = sum(sizes)
        if self._capacity > limit:
            self._capacity, self._buffers = max(limit // 2, *sizes), [None, None]
        self._turn = 0
        self._device = torch.device("cpu")
        self._source: Iterator[tuple[str, Tensor]] = iter(())
        self._next: tuple[str, Tensor] | None = None
        self._seen: dict[str, tuple[int, ...]] = {}
        self.checksums: dict[str, tuple[int, str]] = {}

    def first(self, source: Iterable[tuple[str, Tensor]], *, checksums: bool = False) -> Bucket:
        """Begin an update. The source is read as buckets are asked for, and its tensors may change only after the last.

        Args:
            checksums: take the checksum of each tensor as it was staged, into `self.checksums`.

        Raises:
            EngineError: a name is unknown, or a shape differs; of the last bucket also: tensors are missing.
        """
        self._source, self._seen, self.checksums = iter(source), {}, {}
        self._takes_checksums = checksums
        self._next = self._read()
        if self._next is not None:
            self._device = self._next[1].device
        return self.following()

    def following(self) -> Bucket:
        """The next bucket, which overwrites the last but one: the server must have loaded that.

        Raises:
            EngineError: as `first`.
        """
        sources: list[Tensor] = []
        views: list[tuple[str, Tensor]] = []
        end = 0
        while self._next is not None:
            name, tensor = self._next
            size = self._aligned(tuple(tensor.shape))
            if end + size > self._capacity:
                break
            views.append((name, self._place(tensor, end)))
            sources.append(tensor)
            end += size
            self._next = self._read()
        if not views:
            raise EngineError(f"the new weights hold no tensor at all; {self._layout.folder} has other names")
        buffer = self._buffers[self._turn]
        assert buffer is not None
        self._turn = (self._turn + 1) % len(self._buffers)
        with torch.no_grad():
            torch._foreach_copy_([view for _, view in views], sources)
        if self._takes_checksums:
            self.checksums |= parameter_checksums(views)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # another process reads without waiting for our stream
        return Bucket(tuple(views), buffer[:end], last=self._next is None)

    def _read(self) -> tuple[str, Tensor] | None:
        """The next tensor that is sent, checked; None at the end, when all must have been there."""
        for name, tensor in self._source:
            if self._layout.tied and name == "lm_head.weight":
                continue
            shape = tuple(tensor.shape)
            if name in self._seen:
                raise EngineError(f"the new weights hold {name} twice")
            if self._layout.shapes.get(name) != shape:
                self._layout.check(self._seen | {name: shape} | self._rest(name))
            self._seen[name] = shape
            return name, tensor.detach()
        self._layout.check(self._seen)
        return None

    def _rest(self, name: str) -> dict[str, tuple[int, ...]]:
        """What is still to come, where the tensor `name` alone shall be found fault with."""
        return {other: shape for other, shape in self._layout.shapes.items() if other != name}

    def _aligned(self, shape: tuple[int, ...]) -> int:
        return -(-torch.Size(shape).numel() * self._dtype.itemsize // self._alignment) * self._alignment

    def _place(self, tensor: Tensor, offset: int) -> Tensor:
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.device != self._device:
            buffer = torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
            self._buffers[self._turn] = buffer
        size = tensor.numel() * self._dtype.itemsize
        return buffer[offset : offset + size].view(self._dtype).view(tensor.shape)
