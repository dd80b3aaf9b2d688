"""DeepSeek V3, R1 and V3.1: a section of calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

V3 and R1 write `function<｜tool▁sep｜>NAME` and a fenced JSON block, V3.1 `NAME<｜tool▁sep｜>` and bare JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.backend.gateway.formats.base import Call, call_from, decode_json
from sparring.backend.gateway.formats.marked import MarkedFormat

__all__ = ["DeepSeekFormat"]

_FENCED = re.compile(r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n<]+)\n```json\n")
_BARE = re.compile(r"\s*<｜tool▁call▁begin｜>([^\n<]+)<｜tool▁sep｜>")
_FENCED_TAIL, _BARE_TAIL = re.compile(r"\s*```\s*<｜tool▁call▁end｜>"), re.compile(r"\s*<｜tool▁call▁end｜>")
_END = re.compile(r"\s*<｜tool▁calls▁end｜>")


class DeepSeekFormat(MarkedFormat):
    reads_special_tokens = True
    opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

    def read(self, text: str, position: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[Call], int]:
        calls: list[Call] = []
        while True:
            fenced = _FENCED.match(text, position)
            head = fenced or _BARE.match(text, position)
            if head is None:
                break
            arguments, position = decode_json(text, head.end())
            tail = (_FENCED_TAIL if fenced else _BARE_TAIL).match(text, position)
            if tail is None:
                raise ValueError("a call does not end")
            calls.append(call_from(head[1].strip(), arguments))
            position = tail.end()
        end = _END.match(text, position)
        if end is None or not calls:
            raise ValueError("the section does not end")
        return calls, end.end()
