"""ChatFormat: what turns messages into token ids and sampled token ids into a message. Tokenizer, template, parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sparring.backend.gateway.formats import ToolFormat, get_format
from sparring.backend.gateway.formats.think import THINK
from sparring.backend.gateway.template import ChatTemplate, find_template, is_shipped, shipped_template
from sparring.errors import ConfigError, GatewayError
from sparring.types import Message, ToolCall

__all__ = ["ChatFormat"]

# Of Unicode's noncharacters, which no text should interchange; text that does all the same cannot imitate them.
_SPLIT = "\ufdd0"  # cuts a special token, or a mark, that stands in a message's text
_OPENINGS = 256  # conversations whose opening is kept in tokens: more than there are groups that begin at once
_MARK = "\ufdd1\ufdd2"  # stands for an assistant message's content, to find what the template puts behind it

History: TypeAlias = Literal["sampled", "template"]

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "sparring_probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "An argument."}}},
    },
}


class ChatFormat:
    """Tokenizer, chat template and tool-call format of one model.

    Text that stands in a message is never encoded as a special token: a tool's result that holds `<|im_end|>` does not
    end its turn.

    Attributes:
        end_ids: tokens that end a turn: the template's own end of turn, and the model's end-of-sequence tokens.
        template: source of the chat template, to be written with a trained model.
        renders_tools: the template shows tool schemas to the model.
        takes_tools: it does, or is one of sparring's own, which show calls and results.
        history: what a prompt shows of the model's earlier turns: "sampled", their own tokens, or "template", what the
            template makes of them, which may leave out earlier reasoning.
        parser: the tool-call format.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        parser: ToolFormat,
        *,
        eos: Iterable[int] = (),
        history: History = "sampled",
    ) -> None:
        self._tokenizer, self._template, self.parser, self.history = tokenizer, template, parser, history
        self._encode_opening = lru_cache(_OPENINGS)(self._encode)
        self.template = template.source
        added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
        control = [text for text, special in added.items() if special or re.fullmatch(r"<[|｜].*[|｜]>", text)]
        self._unsafe = re.compile("|".join(map(re.escape, (_SPLIT, _MARK, *sorted(control, key=len, reverse=True)))))
        opening = [Message("user", "x")]
        closed = self._template.render([*opening, Message("assistant", _MARK)], (), generation_prompt=False)
        self._closing = closed.rpartition(_MARK)[2]  # '<|im_end|>\n' in ChatML
        prompted = self._render(opening, (), generation_prompt=True)
        self._prefill = THINK if prompted.rstrip().endswith(THINK) else ""
        closers = [text for text in control if self._closing.startswith(text)]
        ends = {tokenizer.token_to_id(text) for text in closers if text not in parser.inner_ends} | set(eos)
        self.end_ids: tuple[int, ...] = tuple(sorted(id_ for id_ in ends if id_ is not None))
        self._end_strings = (*closers, *(text for text in control if tokenizer.token_to_id(text) in self.end_ids))
        self.renders_tools = _PROBE_TOOL["function"]["name"] in self._try_render(opening, [_PROBE_TOOL])  # type: ignore[index]
        self.takes_tools = self.renders_tools or is_shipped(self.template)

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        tool_template: str | None,
        tool_format: str = "hermes",
        history: History = "sampled",
        tools: bool = True,
    ) -> ChatFormat:
        """Read tokenizer and template of a Hugging Face folder.

        Args:
            model_path: the folder; it needs a `tokenizer.json`.
            tool_template: name of a template shipped with sparring, for a model whose own has no tools; None: its own.
            tool_format: how tool calls are parsed out of the text.
            tools: whether conversations will have some. Where they do unforeseen, `takes_tools` tells what to refuse.

        Raises:
            ConfigError: no tokenizer, no chat template, or one that ignores `tools` and no `tool_template`.
        """
        folder = Path(model_path)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"model.path: no usable tokenizer.json in {folder}: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        source = shipped_template(tool_template) if tool_template else find_template(folder, config)
        if source is None:
            raise ConfigError(
                f"model.path: the model in {folder} has no chat template; "
                "set model.tool_template to one that is shipped, such as 'hermes'"
            )
        special = {name: _text(value) for name, value in config.items() if name.endswith("_token") and value}
        eos = _as_list(_read_json(folder / "generation_config.json").get("eos_token_id"))
        eos += _as_list(tokenizer.token_to_id(special.get("eos_token", "")))
        chat = cls(tokenizer, ChatTemplate(source, special), get_format(tool_format), eos=eos, history=history)
        if tools and not chat.takes_tools:
            raise ConfigError(
                f"model.tool_template: the chat template of {folder} ignores tools; "
                "choose one that is shipped, such as 'hermes' (without tools in a request it is plain ChatML)"
            )
        if not chat.end_ids:
            raise ConfigError(f"model.path: nothing in {folder} says which token ends a turn; name eos_token_id there")
        return chat

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation's opening, up to where the model speaks.

        Kept for a while: the members of a group open alike.

        Raises:
            GatewayError: the template refuses the messages.
        """
        if not messages:
            raise GatewayError("messages: at least one message is needed", param="messages")
        return list(self._encode_opening(self._render(messages, tools, generation_prompt=True)))

    def encode_suffix(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        ended: bool,
    ) -> list[int] | None:
        """Token ids that follow an assistant message already in tokens, up to where the model speaks again.

        Args:
            history: the conversation, that assistant message last.
            new: the messages behind it.
            ended: whether its tokens end with an end-of-turn token; if not, the turn is closed here.

        Returns:
            None where the template renders the past differently once there are new messages, and does so behind the
            assistant message, so that no suffix exists.
        """
        tools = self._safe_tools(tools)
        *past, said = [self._safe_message(message) for message in history]
        said, new = replace(said, reasoning=None), [self._safe_message(message) for message in new]
        # Templates that drop earlier reasoning change what they render for the assistant message, so the new text is
        # looked for behind a mark in its content.
        marked = replace(said, content=_MARK)
        full = self._template.render([*past, marked, *new], tools, generation_prompt=True)
        if _MARK in full:
            behind = full.rpartition(_MARK)[2]
            # What stands behind the mark within the message (tool calls, end of turn) rarely depends on what precedes
            # it: a short conversation tells it, and the whole one is the fallback.
            for before in ([Message("user", "x")], past):
                alone = self._template.render([*before, marked], tools, generation_prompt=False).rpartition(_MARK)[2]
                if behind.startswith(alone):
                    return self._encode(self._behind_turn(behind[len(alone) :], ended))
        # Where a template leaves out the content of a message with tool calls there is no mark: compare whole texts.
        alone = self._template.render([*past, said], tools, generation_prompt=False)
        full = self._template.render([*past, said, *new], tools, generation_prompt=True)
        if full.startswith(alone):
            return self._encode(self._behind_turn(full[len(alone) :], ended))
        return None

    def encode_rendered(
        self, context_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | None:
        """Token ids that the template's own rendering of all `messages` has behind a context.

        Texts are compared, not tokens: a model may spell a text in other tokens than the tokenizer.

        Returns:
            None where the rendering does not begin with the context: it shows the past otherwise than it was.
        """
        full = self._render(messages, tools, generation_prompt=True)
        left = len(shown := self.decode(context_ids, special_tokens=True))
        pieces = full.split(_SPLIT)
        if not "".join(pieces).startswith(shown):
            return None
        while left > len(pieces[0]):
            left -= len(pieces.pop(0))
        return self._encode(_SPLIT.join([pieces[0][left:], *pieces[1:]]))

    def _behind_turn(self, new: str, ended: bool) -> str:
        """The text from a turn's sampled tokens on: what is left of its closing, then the new messages."""
        text = self._closing + new
        end = next((end for end in self._end_strings if text.startswith(end)), "")
        return text[len(end) :] if ended else text

    def encode_reply(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids that the model would have to sample, behind `encode_prompt(messages)`, to say `reply`.

        For demonstrations (`sparring.demonstrations`): what a model says itself is kept as sampled, never encoded.

        Raises:
            GatewayError: the template shows an assistant message otherwise than as a continuation of its prompt.
        """
        prompt = self._render(messages, tools, generation_prompt=True)
        full = self._render([*messages, reply], tools, generation_prompt=False)
        end = next((end for end in self._end_strings if self._closing.startswith(end)), None)
        if not full.startswith(prompt) or end is None:
            raise GatewayError("this chat template cannot write a demonstration: it rewrites its generation prompt")
        return self._encode(full[len(prompt) :].removesuffix(self._closing) + end)

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)

    def said(self, token_ids: Sequence[int]) -> str:
        """A sampled turn as its format reads it: reasoning that the prompt opened included, the end of turn not."""
        said = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
        return self._prefill + self.decode(said, special_tokens=self.parser.reads_special_tokens)

    def incremental_decoder(self) -> Callable[[int], str]:
        """A function that takes the tokens of a turn one by one and gives what each adds to `said`."""
        stream = DecodeStream(skip_special_tokens=not self.parser.reads_special_tokens)
        prefill = self._prefill

        def decode(token_id: int) -> str:
            nonlocal prefill
            text = "" if token_id in self.end_ids else stream.step(self._tokenizer, token_id) or ""
            text, prefill = prefill + text, ""
            return text

        return decode

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, generation_prompt: bool
    ) -> str:
        safe = [self._safe_message(message) for message in messages]
        return self._template.render(safe, self._safe_tools(tools), generation_prompt=generation_prompt)

    def _try_render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._render(messages, tools, generation_prompt=True)
        except GatewayError:
            return ""

    def _safe(self, text: str) -> str:
        return self._unsafe.sub(lambda found: found[0][:1] + _SPLIT + found[0][1:], text)

    def _safe_tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return json.loads(self._safe(json.dumps(list(tools), ensure_ascii=False))) if tools else tools

    def _safe_message(self, message: Message) -> Message:
        return replace(
            message,
            content=message.content and self._safe(message.content),
            reasoning=message.reasoning and self._safe(message.reasoning),
            name=message.name and self._safe(message.name),
            tool_call_id=message.tool_call_id and self._safe(message.tool_call_id),
            tool_calls=tuple(
                ToolCall(self._safe(call.id), self._safe(call.name), self._safe(_unescaped(call.arguments)))
                for call in message.tool_calls
            ),
        )

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that is no message: special tokens in it are special tokens."""
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates
            text = text.encode("utf-8", "replace").decode()
        pieces = (self._tokenizer.encode(piece, add_special_tokens=False) for piece in text.split(_SPLIT))
        return [id_ for piece in pieces for id_ in piece.ids]


def _unescaped(arguments: str) -> str:
    """JSON with its characters as they are: `\\u003c` would be a `<` again by the time the template shows it."""
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False) if "\\u" in arguments else arguments
    except (ValueError, RecursionError):
        return arguments


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not valid JSON: {error}") from error


def _text(token: Any) -> str:
    """A special token in tokenizer_config.json: a string, or an object that describes an added token."""
    return token["content"] if isinstance(token, dict) else str(token)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
