"""A Hugging Face causal model that reads and writes a `SlotCache`, and whose weights can be exchanged whole."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from sparring.backend.engines.adapted_linear import add_adapter
from sparring.backend.engines.packed_linear import PackedLinear, can_pack
from sparring.backend.engines.slot_cache import Feed, SlotCache
from sparring.backend.lora import read_adapter
from sparring.config import LoraConfig
from sparring.errors import ConfigError, EngineError

__all__ = ["SlotModel"]

_ATTENTION = "sparring_slots"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of attentions that a plain softmax does not meet
_PROBE_TOKENS = 24
# Mean difference to the model's own attention, as a share of the logits' spread: rounding stays far below, and an
# attention that is something else lies far above.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}


class SlotModel:
    """Logits for flat batches of `Feed`s, at the last token of each."""

    def __init__(self, source: str | Path | PreTrainedModel, *, slots: int, rows: int, max_length: int,
                 dtype: torch.dtype, device: torch.device, row_by_row: bool = False,
                 lora: LoraConfig | None = None) -> None:  # fmt: skip
        """A model object is copied: what its owner does to it later does not reach the engine.

        Args:
            rows: tokens that a forward pass usually has; `slots` and `row_by_row` as in `SlotCache`.
            lora: put an adapter beside the model's layers; `load_weights` then takes the adapter's tensors alone.

        Raises:
            EngineError: the folder cannot be loaded, or the architecture is not one whose attention takes our mask.
        """
        self.device, self.dtype = device, dtype
        model = _copy(source, dtype) if isinstance(source, PreTrainedModel) else _load(source, dtype)
        _check_architecture(model, max_length)
        model.to(device=device)  # type: ignore[call-arg]  # its decorator loses the signature
        self._model = model.eval().requires_grad_(False)
        self.model_type: str = model.config.model_type
        self.vocabulary: int = model.config.get_text_config().vocab_size
        try:
            exchanged = None if lora is None else add_adapter(model, lora)
        except ConfigError as error:
            raise EngineError(str(error)) from error
        self._adapted = exchanged is not None
        self._plain = dict(model.requires_grad_(False).named_parameters())
        self.shapes = {n: tuple(p.shape) for n, p in self._plain.items() if exchanged is None or n in exchanged}
        self.tied = set() if exchanged else set(getattr(model, "all_tied_weights_keys", None) or ())
        self._packed: dict[str, list[PackedLinear]] = {}
        expected = self._probe_own_attention()
        model.set_attn_implementation(_ATTENTION)
        if can_pack(device, dtype):
            self._pack(rows)
        shapes = _Shapes()
        self._call(expected[0].tolist(), range(_PROBE_TOKENS), [0], shapes)
        self.cache = SlotCache(slots=slots, length=max_length, dtype=dtype, device=device, row_by_row=row_by_row,
                               **shapes.found(self.model_type))  # fmt: skip
        self._probe_slots(*expected)

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """One pass over all tokens of the feeds, which are in `batch_order`. Returns logits `[len(feeds), V]`."""
        self.cache.plan(feeds)
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for feed in feeds:
            tokens += feed.token_ids
            positions += range(feed.start, feed.start + len(feed.token_ids))
            last.append(len(tokens) - 1)
        return self._call(tokens, positions, last, self.cache)

    @torch.inference_mode()
    def load_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights at once, or all of the adapter's, from tensors of any floating type on any device.

        Copies of tied parameters may be among them or not.

        Raises:
            EngineError: the source fails, a name is unknown or missing, or a shape differs; nothing has changed then.
        """
        try:
            staged = {name: tensor.detach().to(self.device, self.dtype) for name, tensor in source}
        except Exception as error:
            raise EngineError(
                f"new weights could not be read: {type(error).__name__}: {error}. The old weights stay"
            ) from error
        missing = sorted(self.shapes.keys() - staged.keys())
        unknown = sorted(staged.keys() - self.shapes.keys() - self.tied)
        if missing or unknown:
            whose = "its adapter" if self._adapted else "named_parameters() of its AutoModelForCausalLM"
            raise EngineError(
                f"new weights do not fit a model of type {self.model_type}: "
                f"{len(missing)} missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}; "
                f"names are those of {whose}. The old weights stay"
            )
        for name, shape in self.shapes.items():
            if tuple(staged[name].shape) != shape:
                raise EngineError(
                    f"new weights for {name} have shape {tuple(staged[name].shape)}, the model's have {shape}: "
                    "they are of another model. The old weights stay"
                )
        for name in self.shapes:
            if name in self._plain:
                self._plain[name].copy_(staged[name])
            for linear in self._packed.get(name, ()):
                linear.pack(staged[name])

    def read_folder(self, folder: str | Path) -> Iterator[tuple[str, Tensor]]:
        """What `load_weights` takes, of a Hugging Face folder, or of an adapter's where there is one beside the model.

        Raises:
            EngineError: it is no such folder.
        """
        if not self._adapted:
            yield from _load(folder, self.dtype).named_parameters()
            return
        try:
            yield from read_adapter(Path(folder)).items()
        except ConfigError as error:
            raise EngineError(str(error)) from error

    @torch.inference_mode()
    def _call(self, tokens: Sequence[int], positions: Sequence[int], last: Sequence[int],
              cache: SlotCache | _Shapes) -> Tensor:  # fmt: skip
        output = self._model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=self.device),
            slot_cache=cache,
        )
        logits = output.logits[0]
        return logits if len(logits) == len(last) else logits[list(last)]  # not every model takes logits_to_keep

    def _pack(self, rows: int) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for module in list(self._model.modules()):
            for child_name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    packed = PackedLinear(child, rows)
                    setattr(module, child_name, packed)
                    self._packed.setdefault(names[id(child.weight)], []).append(packed)
        used = {id(parameter) for parameter in self._model.parameters()}
        for name in [n for n, p in self._plain.items() if n in self._packed and id(p) not in used]:
            del self._plain[name]  # an embedding that a head is tied to stays

    @torch.inference_mode()
    def _probe_own_attention(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.vocabulary, (_PROBE_TOKENS,), generator=generator)
        logits = self._model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]
        return tokens, logits[-4:].float()

    def _probe_slots(self, tokens: Tensor, expected: Tensor) -> None:
        """Start a sequence in slot 0, extend it, decode it, and compare with the model's own attention."""
        ids = tokens.tolist()
        rows = [
            self.forward([Feed(0, start, ids[start:end])])[-1].float()
            for start, end in ((0, 10), (10, 21), (21, 22), (22, 23), (23, 24))
        ]
        difference = (torch.stack(rows[1:]) - expected).abs().mean() / expected.std().clamp(min=1e-6)
        self.cache.clear()
        if not difference < _PROBE_TOLERANCE[self.dtype]:
            raise EngineError(
                f"a model of type {self.model_type} answers differently through the slot cache "
                f"(by {difference:.2g} of its logits' spread): its attention is more than a causal mask. "
                "Use engine.type=sglang for it"
            )


class _Shapes:
    """Stands in for the cache in the first forward pass, and notes what each layer stores there."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, int]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self._seen[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def found(self, model_type: str) -> dict[str, int]:
        if len(set(self._seen.values())) != 1 or set(self._seen) != set(range(len(self._seen))):
            raise EngineError(
                f"the embedded engine cannot run a model of type {model_type}: its layers store different things "
                f"({sorted(set(self._seen.values()))}). Use engine.type=sglang for it"
            )
        heads, key_dim, value_dim = self._seen[0]
        return {"layers": len(self._seen), "heads": heads, "key_dim": key_dim, "value_dim": value_dim}


def _slot_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                    slot_cache: SlotCache | _Shapes, scaling: float | None = None,
                    **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface: `[1, heads, N, D]` in, `[1, N, heads, D]` out."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EngineError(
                f"the embedded engine cannot run a model of type {module.config.model_type}: its attention takes "
                f"{name!r}. Use engine.type=sglang for it"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_cache.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(_ATTENTION, _slot_attention)


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """In another type, but for the buffers: rotary frequencies in bfloat16 are off by radians at position 400."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def _load(path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot load a causal language model from {path}: {error}") from error


def _check_architecture(model: PreTrainedModel, max_length: int) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (not kinds and window is not None)
    problem = None
    if model.config.is_encoder_decoder:
        problem = "it has an encoder"
    elif kinds - {"full_attention", "sliding_attention"}:
        problem = f"it has layers of kind {sorted(kinds - {'full_attention', 'sliding_attention'})}"
    elif slides and (window is None or window < max_length):
        problem = f"its attention slides over {window} tokens, fewer than the context of {max_length}"
    elif not getattr(model, "_supports_attention_backend", False):
        problem = "its attention takes no implementation from outside"
    if problem:
        raise EngineError(
            f"the embedded engine cannot run a model of type {model.config.model_type}: {problem}. "
            "Use engine.type=sglang for it"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise EngineError(
            f"model.max_length={max_length} is more than the {limit} positions of a model of type "
            f"{model.config.model_type}: lower it to {limit} at most"
        )
