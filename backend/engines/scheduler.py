"""Which tokens enter which slot in the next forward pass: requests join and leave a running batch."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sparring.backend.engines.base import Completion, FinishReason, SamplingParams
from sparring.backend.engines.sampler import Sampler
from sparring.backend.engines.slot_cache import Feed, batch_order
from sparring.backend.engines.slot_model import SlotModel
from sparring.errors import EngineError

__all__ = ["Decode", "Event", "Scheduler"]

Decode = Callable[[Sequence[int]], str]
_PREFILL_TOKENS = 1024  # most prompt tokens of one forward pass: bounds its memory and how long decoding rows wait
_WORTH_WAITING = 16  # tokens that another request is about to compute, from which on it pays to wait a pass for them
_EXACT_CHUNK = 32  # prompt tokens of one pass, and the grain of shared prefixes, where numbers must repeat exactly


@dataclass(frozen=True)
class Event:
    """What happened to one request: new tokens, and at its end a completion or an error."""

    request_id: int
    token_ids: list[int]
    completion: Completion | None = None
    error: str | None = None


@dataclass(eq=False)
class _Request:
    id: int
    prompt: list[int]
    sampling: SamplingParams
    session_id: str | None
    stream: bool
    room: int
    uniforms: random.Random
    decode: Decode | None
    slot: _Slot | None = None
    todo: list[int] = field(default_factory=list)  # not in the cache yet; sampling follows its last token
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(eq=False)
class _Slot:
    """`token_ids` are those whose keys it holds; `version` is that of the first of them, and the first `prompt_length`
    came, or were to come, as a prompt.

    A slot without a request keeps what it holds: for its session's next turn, or, without a session, for any prompt
    that begins the same way, until the slot is needed.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    prompt_length: int = 0
    version: int = -1
    session_id: str | None = None
    request: _Request | None = None
    used: int = 0


class Scheduler:
    """A running batch over a `SlotModel`. Synchronous; one thread calls it."""

    def __init__(self, model: SlotModel, *, slots: int, cache_slots: int, max_length: int, deterministic: bool,
                 seed: int, decode: Callable[[], Decode | None]) -> None:  # fmt: skip
        """
        Args:
            model: its cache has one slot more than `cache_slots`, which pads fixed batches.
            slots: most requests that decode together; `cache_slots - slots` more can be kept between turns.
            decode: gives the tokenizer's decode function, asked for when a request first has stop strings.
        """
        self.model, self.version = model, 0
        self.waiting: list[_Request] = []
        self.running: list[_Request] = []
        self._slots = [_Slot(index) for index in range(cache_slots)]
        self._rows, self._max_length, self._deterministic = slots, max_length, deterministic
        self._seed, self._seeds, self._decode = seed, random.Random(seed), decode
        self._tick = 0
        self._sampler = Sampler()
        self.stats: dict[str, float] = dict.fromkeys(
            ("tokens", "steps", "occupied_rows", "busy_s", "prefill_computed", "prefill_reused", "evictions"), 0
        )

    def submit(self, request_id: int, prompt: list[int], sampling: SamplingParams, session_id: str | None,
               stream: bool) -> None:  # fmt: skip
        """Queue a request.

        Raises:
            EngineError: it can never run: it does not fit the context, or holds ids that are no tokens.
        """
        room = min(sampling.max_new_tokens, self._max_length - len(prompt))
        if not prompt:
            raise EngineError("an empty prompt cannot be continued: give at least one token")
        _check_sampling(sampling)
        if room < 1:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {self._max_length}: "
                "shorten the episode, or raise model.max_length"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.model.vocabulary:
            raise EngineError(
                f"the prompt holds token ids outside [0, {self.model.vocabulary}): it was encoded for another model"
            )
        decode = self._decode() if sampling.stop else None
        if sampling.stop and decode is None:
            raise EngineError("stop strings need a tokenizer: give the engine a folder that has one, or tokenizer=")
        uniforms = random.Random(self._seed_of(prompt, sampling, session_id))
        self.waiting.append(_Request(request_id, prompt, sampling, session_id, stream, room, uniforms, decode))

    def abort(self, request_id: int) -> None:
        """Forget a request; nobody waits for its completion."""
        self.waiting = [request for request in self.waiting if request.id != request_id]
        for request in [request for request in self.running if request.id == request_id]:
            self._leave(request)

    def abort_all(self) -> list[Event]:
        """End every request with what it has."""
        requests = [*self.running, *self.waiting]
        self.waiting = []
        for request in list(self.running):
            self._leave(request)
        return [_finished(request, "aborted", None) for request in requests]

    def fail_all(self, reason: str) -> list[Event]:
        """End every request with an error, and forget all keys and values."""
        failed = [Event(event.request_id, [], error=reason) for event in self.abort_all()]
        self.model.cache.clear()
        for slot in self._slots:
            slot.token_ids, slot.session_id = [], None
        return failed

    def release(self, session_id: str) -> None:
        for slot in self._slots:
            if slot.session_id == session_id:
                slot.session_id = None

    def set_version(self, version: int) -> None:
        """New weights are in. Running requests go on over their old keys; nothing else reads those any more."""
        self.version = version
        for slot in self._slots:
            if slot.request is None:
                slot.token_ids, slot.session_id = [], None

    def step(self) -> list[Event]:
        """Admit what fits, run one forward pass, sample one token for every request whose prompt is through."""
        began = time.perf_counter()
        self._admit()
        feeds = self._feeds()
        logits = self._exact(feeds) if self._deterministic else self.model.forward([feed for _, feed in feeds])
        events = self._advance(feeds, logits)
        self.stats["steps"] += 1
        self.stats["busy_s"] += time.perf_counter() - began
        return events

    def _admit(self) -> None:
        if not self.waiting or len(self.running) == self._rows:
            return
        # A kept session needs no new room and no prompt: it goes before requests that came earlier.
        kept = {slot.session_id for slot in self._slots if slot.request is None and slot.session_id is not None}
        queue = sorted(self.waiting, key=lambda request: request.session_id not in kept)
        for request in queue:
            if len(self.running) == self._rows:
                break
            source, length = self._longest_prefix(request.prompt, lambda slot: slot.token_ids)
            _, coming = self._longest_prefix(
                request.prompt, lambda slot: slot.token_ids + slot.request.todo if slot.request else []
            )
            if coming >= length + _WORTH_WAITING:
                continue  # its prefix is in this very pass: it copies it afterwards
            self._place(request, source, length)
            self.waiting.remove(request)
            self.running.append(request)

    def _longest_prefix(self, prompt: list[int], holds: Callable[[_Slot], list[int]]) -> tuple[_Slot | None, int]:
        """The slot of the current version that shares most with a prompt. At least one token is left to compute."""
        best, best_length = None, 0
        for slot in self._slots:
            if slot.version != self.version:
                continue
            length = min(_common_prefix(holds(slot), prompt), len(prompt) - 1)
            if self._deterministic:  # a decoding pass gives a token other last bits than a prompt's pass
                length = min(length, slot.prompt_length)
                length -= length % _EXACT_CHUNK
            if length > best_length:
                best, best_length = slot, length
        return best, best_length

    def _place(self, request: _Request, source: _Slot | None, length: int) -> None:
        """Give a request its slot: the source itself where nobody else needs what is there, else a copy of it."""
        mine = source is not None and source.request is None and (
            source.session_id is None
            or (source.session_id == request.session_id and len(source.token_ids) <= length)
        )  # fmt: skip
        slot = source if mine and source is not None else self._free_slot(spare=source)
        if source is not None and slot is not source:
            self.model.cache.copy_prefix(source.index, slot.index, length)
        slot.token_ids, slot.prompt_length = request.prompt[:length], len(request.prompt)
        slot.version, slot.request, slot.session_id = self.version, request, request.session_id
        request.slot, request.todo = slot, request.prompt[length:]
        self.stats["prefill_reused"] += length

    def _free_slot(self, spare: _Slot | None) -> _Slot:
        """The lowest free slot, so that running ones lie together; else the idle session that waited longest."""
        idle = [slot for slot in self._slots if slot.request is None and slot is not spare]
        free = [slot for slot in idle if slot.session_id is None]
        if free:
            return free[0]
        self.stats["evictions"] += 1
        return min(idle, key=lambda slot: slot.used)

    def _feeds(self) -> list[tuple[_Request, Feed]]:
        """What every running request feeds now, in the order that the model takes."""
        feeds = []
        budget = _PREFILL_TOKENS
        for request in self.running:
            assert request.slot is not None
            tokens = request.todo
            if len(tokens) > 1:
                if self._deterministic:  # whole chunks, or none: where they end may not depend on the others
                    tokens = tokens[:_EXACT_CHUNK] if budget >= _EXACT_CHUNK else []
                else:
                    tokens = tokens[: max(budget, 0)]
                budget -= len(tokens)
            if tokens:
                feeds.append((request, Feed(request.slot.index, len(request.slot.token_ids), tokens)))
        return sorted(feeds, key=lambda item: batch_order(item[1]))

    def _exact(self, feeds: list[tuple[_Request, Feed]]) -> torch.Tensor:
        """Every prompt alone, and decoding rows in a batch of fixed size: numbers that no neighbour changes."""
        decode = [feed for _, feed in feeds if len(feed.token_ids) == 1]
        prompts = [feed for _, feed in feeds if len(feed.token_ids) > 1]
        logits = []
        if decode:
            padding = [Feed(len(self._slots), 0, [0])] * (self._rows - len(decode))
            logits.append(self.model.forward([*decode, *padding])[: len(decode)])
        logits += [self.model.forward([feed]) for feed in prompts]
        return torch.cat(logits)

    def _advance(self, feeds: list[tuple[_Request, Feed]], logits: torch.Tensor) -> list[Event]:
        ready: list[_Request] = []
        rows: list[int] = []
        for row, (request, feed) in enumerate(feeds):
            assert request.slot is not None
            request.slot.token_ids += feed.token_ids
            request.todo = request.todo[len(feed.token_ids) :]
            if not request.token_ids:
                self.stats["prefill_computed"] += len(feed.token_ids)
            if not request.todo:
                ready.append(request)
                rows.append(row)
        if not ready:
            return []
        logits = logits if len(rows) == len(feeds) else logits[rows]
        draws = self._sampler.draw(logits, [r.sampling for r in ready], [r.uniforms.random() for r in ready])
        if any(draw.logprob != draw.logprob for draw in draws):
            raise EngineError(
                f"weights of version {self.version} give logits that are not finite: training has diverged, "
                "or the weights were damaged on their way"
            )
        events = []
        for request, draw in zip(ready, draws, strict=True):
            request.token_ids.append(draw.token)
            request.logprobs.append(draw.logprob)
            request.versions.append(self.version)
            if draw.top is not None:
                request.top.append(draw.top)
            finish, stop_string = _finish_reason(request)
            if finish is not None:
                self._leave(request)
                events.append(_finished(request, finish, stop_string, [draw.token] if request.stream else []))
            else:
                request.todo = [draw.token]
                if request.stream:
                    events.append(Event(request.id, [draw.token]))
        self.stats["tokens"] += len(ready)
        self.stats["occupied_rows"] += len(ready)
        return events

    def _leave(self, request: _Request) -> None:
        self.running.remove(request)
        slot = request.slot
        assert slot is not None
        self._tick += 1
        slot.request, slot.used = None, self._tick
        # Old keys serve nobody; and where numbers must repeat, no turn may depend on whether its session was kept.
        if self._deterministic or slot.version != self.version:
            slot.session_id = None

    def _seed_of(self, prompt: list[int], sampling: SamplingParams, session_id: str | None) -> int:
        if sampling.seed is not None:
            return sampling.seed
        if self._deterministic and session_id is not None:
            key = repr((self._seed, session_id, prompt)).encode()
            return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
        return self._seeds.getrandbits(64)


def _check_sampling(sampling: SamplingParams) -> None:
    problems = {
        "max_new_tokens of at least 1": sampling.max_new_tokens >= 1,
        "a temperature of at least 0": sampling.temperature >= 0,
        "top_p in (0, 1]": 0 < sampling.top_p <= 1,
        "min_p in [0, 1)": 0 <= sampling.min_p < 1,
        "a top_k of at least 0": sampling.top_k >= 0,
        "stop strings that are not empty": all(sampling.stop),
    }
    broken = [rule for rule, holds in problems.items() if not holds]
    if broken:
        raise EngineError(f"sampling needs {' and '.join(broken)}, got {sampling}")


def _finish_reason(request: _Request) -> tuple[FinishReason | None, str | None]:
    if request.token_ids[-1] in request.sampling.stop_token_ids:
        return "stop", None
    if request.decode is not None:
        stop_string = _stop_string(request.token_ids, request.sampling.stop, request.decode)
        if stop_string is not None:
            return "stop", stop_string
    if len(request.token_ids) == request.room:
        return "length", None
    return None, None


def _stop_string(token_ids: list[int], stop: Iterable[str], decode: Decode) -> str | None:
    """The stop string that the last token completed, the first in the text if there are several."""
    # Every token but a special one is at least a byte, so a string's last bytes lie in as many tokens.
    window = max(len(string.encode()) for string in stop) + 8
    text = decode(token_ids[-window:])
    found = [(text.find(string), string) for string in stop if string in text]
    return min(found)[1] if found else None


def _finished(request: _Request, reason: FinishReason, stop_string: str | None, new: Sequence[int] = ()) -> Event:
    completion = Completion(
        request.token_ids,
        request.logprobs,
        request.versions,
        reason,
        stop_string,
        request.top if request.sampling.top_logprobs else None,
    )
    return Event(request.id, list(new), completion)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, by halving: comparing slices is fast, comparing tokens in a loop is not."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
