"""Reading a `RunConfig`: YAML with line numbers, dotted overrides, and errors that name the nearest valid key."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sparring.config import RunConfig
from sparring.errors import ConfigError
from sparring.spelling import nearest

__all__ = ["LoadedConfig", "explain_keys", "keys_named", "load_config", "make_config"]

# A section that may be given as a bare string names its first key: `objective: dapo`.
_SHORTHANDS = {"objective": "name", "engine": "type", "env": "id", "model": "path", "agent": "policy"}

# What other trainers call a knob, by its last name or in full, where no spelling leads to ours.
_SYNONYMS = {
    "lr": ("trainer.learning_rate", "warm_start.learning_rate"),
    "bs": ("rollout.groups_per_step", "warm_start.batch_size"),
    "batch_size": ("rollout.groups_per_step",),
    "num_generations": ("rollout.group_size",),
    "epochs": ("trainer.steps",),
    "max_steps": ("trainer.steps",),
    "temp": ("sampling.temperature",),
    "max_tokens": ("sampling.max_new_tokens",),
    "model.name": ("model.path",),
    "env.name": ("env.id",),
}


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-5 as a number (YAML 1.1 wants 1.0e-5) and refuses a key given twice."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+0123456789.")
)


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration. `origins`: where each dotted key's value came from, as file:line or as the override."""

    config: RunConfig
    origins: Mapping[str, str]
    name: str

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir.replace("{name}", self.name))

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """Each knob as (dotted key, value, origin)."""
        for key, value in _leaves(self.config):
            yield key, _as_json(value), self.origins.get(key, "default")

    def to_yaml(self) -> str:
        """The resolved file, which loads to the same configuration and names the same run folder, whatever its name."""
        resolved = self.config.model_copy(update={"run_dir": str(self.run_dir)})
        return yaml.safe_dump(json.loads(resolved.model_dump_json()), sort_keys=False)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read `path`, apply `key.subkey=value` overrides (values in YAML), check everything.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, contradiction; with file and line, and the nearest key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the configuration {path}: it is no text in UTF-8") from error
    origins: dict[str, str] = {}
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if node is None:
        raise ConfigError(f"{path} is empty; it needs at least model.path and env.id")
    document = _read_node(node, "", str(path), origins)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a mapping of sections such as model, env, rollout, trainer")
    return _resolve(document, overrides, origins, path.stem, str(path))


def make_config(document: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str) -> LoadedConfig:
    """As `load_config`, from a document that no file holds.

    Raises:
        ConfigError: as there.
    """
    return _resolve(copy.deepcopy(dict(document)), overrides, {}, name)


def _resolve(
    document: dict[str, Any], overrides: Sequence[str], origins: dict[str, str], name: str, file: str = "configuration"
) -> LoadedConfig:
    for override in overrides:
        _apply_override(document, override, origins)
    for section, key in _SHORTHANDS.items():
        if isinstance(document.get(section), str):
            document[section] = {key: document[section]}
            if section in origins:
                origins[f"{section}.{key}"] = origins.pop(section)
    # A section with nothing below its name is null in YAML, and means the defaults.
    document = {k: v for k, v in document.items() if v is not None or k not in RunConfig.model_fields}
    _check_keys(document, RunConfig, "", origins)
    try:
        config = RunConfig.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, file)) from error
    return LoadedConfig(config, origins, name)


def _read_node(node: yaml.Node, prefix: str, file: str, origins: dict[str, str]) -> Any:
    """The node as Python data; notes the line of every key on the way."""
    if not isinstance(node, yaml.MappingNode):
        loader = _Loader("")
        try:
            return loader.construct_document(node)
        except yaml.YAMLError as error:
            raise ConfigError(f"{file}:{node.start_mark.line + 1}: {error}") from error
    document: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in document:
            raise ConfigError(f"{file}:{line}: the key {prefix}{key} is given twice")
        origins[f"{prefix}{key}"] = f"{file}:{line}"
        document[key] = _read_node(value_node, f"{prefix}{key}.", file, origins)
    return document


def _apply_override(document: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"the override {override!r} is not of the form key.subkey=value")
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {override!r} is not YAML: {error}") from error
    *parents, last = key.split(".")
    place = document
    for depth, parent in enumerate(parents):
        inner = place.setdefault(parent, {})
        if isinstance(inner, str) and depth == 0 and parent in _SHORTHANDS:
            inner = place[parent] = {_SHORTHANDS[parent]: inner}
            origins[f"{parent}.{_SHORTHANDS[parent]}"] = origins[parent]
        if not isinstance(inner, dict):
            raise ConfigError(f"the override {override!r} names a key inside {parent}, which is {inner!r}")
        place = inner
    place[last] = value
    origins[key] = f"override {override}"


def _check_keys(document: Mapping[str, Any], model: type[BaseModel], prefix: str, origins: Mapping[str, str]) -> None:
    for key, value in document.items():
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(_unknown_key(f"{prefix}{key}", origins))
        inner = _section(field.annotation)
        if isinstance(value, Mapping) and inner is not None:
            _check_keys(value, inner, f"{prefix}{key}.", origins)


def explain_keys(prefix: str = "") -> list[tuple[str, str, str]]:
    """The knobs whose dotted keys begin with `prefix`, each as (key, default, what it means).

    Raises:
        ConfigError: there are none; it names the nearest.
    """
    knobs = [
        (
            key,
            "required" if field.is_required() else _as_json(field.get_default(call_default_factory=True)),
            field.description or "",
        )
        for key, field in _schema_fields(RunConfig, "")
        if key.startswith(prefix) and _section(field.annotation) is not field.annotation
    ]
    if not knobs:
        raise ConfigError(_unknown_key(prefix, {}))
    return knobs


def keys_named(key: str) -> list[str]:
    """The keys that mean what `key` does, or whose last name is its own; those of its section first."""
    section, _, last = key.rpartition(".")
    same = [name for name, _ in _schema_fields(RunConfig, "") if name.rpartition(".")[2] == last]
    meant = dict.fromkeys([*_SYNONYMS.get(key, ()), *_SYNONYMS.get(last, ()), *same])
    return sorted(meant, key=lambda name: name.rpartition(".")[0] != section)


def _unknown_key(key: str, origins: Mapping[str, str]) -> str:
    known = [name for name, _ in _schema_fields(RunConfig, "")]
    guess = next(iter(keys_named(key)), None) or nearest(key, known)
    advice = f"did you mean {guess}?" if guess else "`sparring config explain` lists all keys"
    return f"{origins.get(key, 'configuration')}: unknown key {key}; {advice}"


def _explain(error: ValidationError, origins: Mapping[str, str], file: str) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            lines.append(f"{file}: the key {key} is missing")
        elif key:
            lines.append(f"{origins.get(key, file)}: {key}={json.dumps(problem['input'])}: {message}")
        else:
            lines.append(f"{file}: {message}")
    return "\n".join(lines)


def _schema_fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every key that there may be, sections included."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if (inner := _section(field.annotation)) is not None:
            yield from _schema_fields(inner, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type is, or may be; None where it is a plain value."""
    for kind in get_args(annotation) if isinstance(annotation, UnionType) else (annotation,):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _as_json(value: Any) -> str:
    return json.dumps(value, default=BaseModel.model_dump)


def _leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
