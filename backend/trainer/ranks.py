"""The processes of a training run, one for each device, and what they do together. accelerate owns the processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparring.backend.trainer.interrupt import InterruptGuard
from sparring.backend.trainer.packing import Sample
from sparring.errors import ConfigError, TrainerError, described

__all__ = ["Ranks", "sharding_mesh"]

T = TypeVar("T")


def sharding_mesh(sharding: str, device: torch.device) -> DeviceMesh | None:
    """The ranks over which parameters are sharded; None where they are whole, as in a run of one process."""
    if sharding == "none" or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


class Ranks:
    """
    Args:
        mesh: over which parameters are sharded, or None.

    Raises:
        ConfigError: accelerate itself was told to shard: checkpoints and published weights would be of one shard.
    """

    def __init__(self, accelerator: Accelerator, mesh: DeviceMesh | None) -> None:
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ConfigError("accelerate is set to FSDP: unset ACCELERATE_USE_FSDP, and set trainer.sharding=fsdp2")
        self._accelerator = accelerator
        self.count: int = accelerator.num_processes
        self.index: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process
        self.mesh = mesh

    @property
    def sharded(self) -> bool:
        return self.mesh is not None

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` gives the main rank, on every rank; an error that it raises there is raised on all of them.

        Raises:
            TrainerError: with its words, for an error that cannot be sent as it is.
        """
        if self.count == 1:
            return make()
        made: T | None = None
        error: Exception | None = None
        sent: list[Any] = [None]
        if self.is_main:
            try:
                made = make()
                sent = [pickle.dumps(made)]
            except Exception as raised:
                error, sent = raised, [_SentError.of(raised)]
        broadcast_object_list(sent, from_process=0)
        if isinstance(sent[0], _SentError):
            raise error or sent[0].error()
        return cast(T, made if self.is_main else pickle.loads(sent[0]))  # noqa: S301  # of our own main rank

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        return [value] if self.count == 1 else list(gather_object([value]))

    def share(self, rows: Sequence[list[Sample]]) -> tuple[list[list[Sample]], list[list[Sample]]]:
        """This rank's rows, and those that it passes besides for nothing, since the others wait for it.

        Whole parameters (DDP) want one pass of every rank, at whose end gradients are averaged; sharded ones are
        gathered in every pass, so that all ranks make the same number.
        """
        mine = list(rows[self.index :: self.count])
        passes = -(-len(rows) // self.count) if self.sharded else 1
        cheapest = min(rows, key=lambda members: sum(len(sample.context) for sample in members))
        return mine, [cheapest] * (passes - len(mine))

    def release(self, guard: InterruptGuard) -> None:
        """Obey a Ctrl-C that came while the guard was held. Where parameters are sharded, it is held but for here, and
        all ranks stop at the same step if one was told to: they gather a checkpoint together.

        Raises:
            KeyboardInterrupt: there was one.
        """
        if not self.sharded:
            return guard.release()
        guard.release(any(self.gather(guard.pending)))
        guard.hold()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Say plainly when another rank is gone: communication fails at once, in words that do not tell.

        Raises:
            TrainerError: in place of that failure.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _is_of_communication(error):
                raise
            first = str(error).strip().partition("\n")[0]
            raise TrainerError(
                f"another rank of this run is gone or hangs ({first}): its own output says why. Start all ranks again, "
                "and resume from the last checkpoint"
            ) from error


class _SentError(NamedTuple):
    """An error on its way to other ranks, which may lack its module, or miss what its constructor wants."""

    pickled: bytes
    words: str

    @classmethod
    def of(cls, error: Exception) -> _SentError:
        try:
            return cls(pickle.dumps(error), described(error))
        except Exception:  # whatever its attributes raise
            return cls(b"", described(error))

    def error(self) -> Exception:
        try:
            error = pickle.loads(self.pickled)  # noqa: S301  # of our own main rank
        except Exception:
            error = None
        as_it_was = isinstance(error, Exception) and str(error) in self.words
        return error if as_it_was else TrainerError(f"the main rank failed: {self.words}")


def _is_of_communication(error: RuntimeError) -> bool:
    words = ("gloo", "NCCL", "closed by peer", "reset by peer")
    return isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in words)
