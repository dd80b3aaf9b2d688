"""Packages that only some parts need, by the extra of sparring that installs them. Imports nothing of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["EXTRAS", "install_command", "installed", "lacking", "missing"]

EXTRAS: Mapping[str, tuple[str, ...]] = {
    # extra: the modules that it brings. What it needs of another extra stands there.
    "train": ("torch", "trl", "transformers", "safetensors", "accelerate", "peft", "gguf", "matplotlib", "psutil"),
    "gateway": (
        "fastapi",
        "uvicorn",
        "httptools",
        "httpx",
        "prometheus_client",
        "openai",
        "jinja2",
        "tokenizers",
        "jsonschema",
    ),
    "tasks": ("math_verify",),
    "docker": ("docker",),
    "openai-agents": ("agents",),
    "camel": ("camel",),
    "tau2": ("tau2",),
    "sglang": ("aiohttp",),
    "report": ("tensorboard", "trackio", "wandb"),
    "bitsandbytes": ("bitsandbytes",),
}
_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}
_NOTES = {"camel": " in a virtual environment without openai-agents, which it cannot share"}


def installed(module: str) -> bool:
    """Whether there is such a package: a mere folder of its name, such as wandb's own logs in `wandb/`, is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def missing(modules: Iterable[str], what: str, *, extra: str | None = None) -> str | None:
    """That `what` needs those of these modules that are not installed, and how to install them; None where all are.

    Args:
        extra: to install, where several bring the same module.
    """
    absent = [module for module in modules if not installed(module)]
    if not absent:
        return None
    extras = dict.fromkeys(extra or _EXTRA_OF[module] for module in absent)
    noun, verb = ("package", "is") if len(absent) == 1 else ("packages", "are")
    return f"{what} needs the {noun} {', '.join(absent)}, which {verb} not installed: {install_command(extras)}"


def lacking(error: BaseException) -> str | None:
    """What an import failed for want of, and how to install it; None where that is no package of an extra."""
    if not isinstance(error, ImportError) or error.name is None:
        return None
    module = error.name.partition(".")[0]  # of `agents.exceptions`; also where a folder `agents` was found instead
    if module not in _EXTRA_OF or installed(module):
        return None
    return f"the package {module} is not installed: {install_command([_EXTRA_OF[module]])}"


def install_command(extras: Iterable[str], *, pip: str = "pip") -> str:
    """What installs these extras, from where this sparring came: a checkout may be on no index."""
    names = list(extras)
    option, source = _origin()
    return f"{pip} install {option}'{source}[{','.join(names)}]'{''.join(_NOTES.get(name, '') for name in names)}"


def _origin() -> tuple[str, str]:
    """An option of pip and what to install, as PEP 610 recorded it."""
    try:
        recorded = json.loads(distribution("sparring").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        recorded = {}
    folder = Path(unquote(urlsplit(recorded.get("url", "")).path))
    if "dir_info" not in recorded or not folder.is_dir():
        return "", "sparring"
    return "-e " if recorded["dir_info"].get("editable") else "", "." if folder == Path.cwd() else str(folder)
