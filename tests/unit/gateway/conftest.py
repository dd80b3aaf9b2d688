"""A chat model without weights: a byte-level tokenizer and ChatML, in a Hugging Face folder."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sparring.backend.gateway import ChatFormat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _write_model(folder: Path, template: str | None = CHATML, **config: object) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def write_model():
    return _write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="session")
def chat(model_folder: Path) -> ChatFormat:
    return ChatFormat.load(model_folder, tool_template="hermes")
