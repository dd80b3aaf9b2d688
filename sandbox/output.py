"""Output of untrusted commands: always drained, never kept beyond a bound."""

from __future__ import annotations

__all__ = ["BoundedOutput"]


class BoundedOutput:
    """Keeps the first and the last half of `limit` bytes of a stream, and counts what lay between.

    Memory stays below twice the limit, whatever is fed in.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if len(data) >= self._tail_limit:
            self._tail[:] = data[len(data) - self._tail_limit :]
        elif data:
            self._tail += data
            # Trimming at twice the bound, not at every call, makes the cost a constant per byte.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    @property
    def dropped(self) -> int:
        """Bytes that were read and not kept."""
        return max(0, self.total - self._head_limit - self._tail_limit)

    @property
    def truncated(self) -> bool:
        return self.dropped > 0

    def parts(self) -> tuple[bytes, bytes]:
        """Head and tail; together the whole stream where nothing was dropped."""
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        return bytes(self._head), bytes(tail)

    def text(self) -> str:
        """What was kept as text: undecodable bytes become U+FFFD, and a line says how much was left out."""
        head, tail = (part.decode("utf-8", "replace") for part in self.parts())
        if not self.truncated:
            return (b"".join(self.parts())).decode("utf-8", "replace")
        return f"{head}\n[... {self.dropped} bytes left out ...]\n{tail}"
