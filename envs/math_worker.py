"""The process behind `math_check`: a line `{"gold", "answer"}` in, a line `{"equal"}` out, until its input ends."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys

from math_verify import parse, verify

_MEMORY_BYTES = 2 << 30


def _equal(gold: str, answer: str) -> bool:
    # No time limits here: math-verify turns one that passed into "not equal". The caller kills this process instead.
    parsed_gold, parsed_answer = (parse(f"${text}$", parsing_timeout=None) for text in (gold, answer))
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes our input as it ends
    with contextlib.suppress(ValueError, OSError):  # macOS has the limit and does not let it be set
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"equal": _equal(question["gold"], question["answer"])}), flush=True)


if __name__ == "__main__":
    main()
