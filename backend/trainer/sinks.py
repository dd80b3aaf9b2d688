"""Where a run's numbers go beside `metrics.jsonl`: services by name (`trainer.report_to`), imported when asked for."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from sparring.config import RunConfig
from sparring.errors import ConfigError

__all__ = ["Sinks"]

_log = logging.getLogger(__name__)

_PROJECT = "sparring"
_WANDB_ID = "wandb_id"
_TIMEOUT_S = 60.0  # to log in, to begin, and to send the rest at the end
# What may hold a password: free-form arguments and environment variables stay on this machine.
_PRIVATE = {
    "env": {"kwargs": True, "mixture": True},
    "agent": {"kwargs": True},
    "engine": {"environment": True, "arguments": True, "urls": True},
}


class _Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """Every record to every service. One that fails later is dropped with a warning: `metrics.jsonl` has all, and the
    run goes on.

    Args:
        resume_from: step of the checkpoint that the run goes on from. Later steps happen again: tensorboard hides what
            it had of them; in wandb and trackio they stand twice.

    Raises:
        ConfigError: one of them does not begin: no login, no network, a broken package. Whoever asked for it can still
            mend it: nothing else has begun, and a run folder that was made for them is gone again.
    """

    def __init__(self, config: RunConfig, run_dir: Path, resume_from: int | None) -> None:
        self._open: dict[str, _Sink] = {}
        made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        if config.trainer.report_to:
            run_dir.mkdir(parents=True, exist_ok=True)
        for name in config.trainer.report_to:
            try:
                self._open[name] = _SINKS[name](config, run_dir, resume_from)
            except Exception as error:
                self.close()
                _take_back(made)
                others = ",".join(other for other in config.trainer.report_to if other != name)
                raise ConfigError(
                    f"trainer.report_to: {name} does not begin: {_in_words(error)}. Mend that, or leave it out "
                    f"(trainer.report_to=[{others}])"
                ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """The numbers of a record of `metrics.jsonl`; those of an evaluation under `eval/`."""
        prefix = "eval/" if record["kind"] == "evaluation" else ""
        values = {f"{prefix}{k}": float(v) for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        for name, sink in list(self._open.items()):
            try:
                sink.write(record["step"], values)
            except Exception as error:
                del self._open[name]
                _warn(name, error)

    def close(self) -> None:
        """Write out what is still buffered. Idempotent."""
        while self._open:
            name, sink = self._open.popitem()
            try:
                sink.close()
            except Exception as error:
                _warn(name, error)


def _take_back(made: Sequence[Path]) -> None:
    """Remove folders that were made for the services, the run's first, as far as nothing else has come into them."""
    if made:
        (made[0] / _WANDB_ID).unlink(missing_ok=True)
        for name in ("tensorboard", "wandb"):
            shutil.rmtree(made[0] / name, ignore_errors=True)
    with suppress(OSError):
        for folder in made:
            folder.rmdir()


def _warn(name: str, error: Exception) -> None:
    _log.warning("trainer.report_to: %s failed, it gets nothing more: %s", name, _in_words(error))


def _in_words(error: Exception) -> str:
    """In one line: a service's client may raise anything."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")


class _TensorBoard:
    """Event files in `run_dir/tensorboard`."""

    def __init__(self, config: RunConfig, run_dir: Path, resume_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        again = None if resume_from is None else resume_from + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=again)  # type: ignore[no-untyped-call]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _Wandb:
    """One run of wandb for the whole run folder, resumed with it. Its mode and key are the environment's."""

    def __init__(self, config: RunConfig, run_dir: Path, resume_from: int | None) -> None:
        import wandb

        marker = run_dir / _WANDB_ID
        if not marker.is_file():
            marker.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=_PROJECT,
            name=run_dir.name,
            id=marker.read_text(),
            resume="allow",
            dir=run_dir,
            config=config.model_dump(exclude=_PRIVATE),
            settings=wandb.Settings(
                silent=True,
                console="off",
                login_timeout=_TIMEOUT_S,
                init_timeout=_TIMEOUT_S,
                finish_timeout=_TIMEOUT_S,
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # its own count of records only ever goes up

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A local trackio project, `trackio show --project sparring`."""

    def __init__(self, config: RunConfig, run_dir: Path, resume_from: int | None) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=_PROJECT,
            name=run_dir.name,
            resume="allow",
            config=config.model_dump(exclude=_PRIVATE),
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_SINKS: Mapping[str, Callable[[RunConfig, Path, int | None], _Sink]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _Wandb,
}
