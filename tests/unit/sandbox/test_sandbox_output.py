"""Bounded output: what is kept is the beginning and the end, and memory stays bounded."""

from hypothesis import given
from hypothesis import strategies as st

from sparring.sandbox.live import _Call
from sparring.sandbox.output import BoundedOutput

chunks = st.lists(st.binary(max_size=50), max_size=30)


@given(chunks, st.integers(1, 60))
def test_the_head_and_the_tail_are_kept_however_it_comes_in(parts: list[bytes], limit: int) -> None:
    output = BoundedOutput(limit)
    for part in parts:
        output.feed(part)
    whole = b"".join(parts)
    head, tail = output.parts()
    assert output.total == len(whole)
    assert output.truncated == (len(whole) > limit)
    if output.truncated:
        assert len(head) + len(tail) == limit
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert output.dropped == len(whole) - limit
    else:
        assert head + tail == whole


def test_memory_is_bounded() -> None:
    output = BoundedOutput(1000)
    for _ in range(10_000):
        output.feed(b"x" * 100)
    assert len(output._head) + len(output._tail) <= 2000
    assert output.text().count("x") == 1000
    assert "999000 bytes left out" in output.text()


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=40), st.integers(0, 255))
def test_an_end_mark_is_found_however_the_stream_is_cut(body: bytes, cuts: list[int], code: int) -> None:
    call = _Call(10_000)
    mark = b"\x1e" + call.new_mark().encode()
    stream = body + mark + b" %d /some/where\n" % code
    for name in (1, 2):
        rest = stream
        for cut in cuts:
            call.feed(name, rest[:cut])
            rest = rest[cut:]
        call.feed(name, rest)
    assert call.done.is_set()
    assert call.exit_code == code
    assert call.word == "/some/where"
    assert b"".join(call.outputs[1].parts()) == body == b"".join(call.outputs[2].parts())
