"""What an episode may spend: model calls and sampled tokens, held to by requests that run at once."""

from __future__ import annotations

import asyncio

from sparring.errors import BudgetExhausted
from sparring.types import StopReason

__all__ = ["Budget"]


class Budget:
    """Turns and tokens of one session. A request takes what it may need, and gives back what it did not.

    Attributes:
        exhausted: what ran out, once a request was refused for it.
    """

    def __init__(self, *, turns: int, tokens: int) -> None:
        self._turns, self._tokens = turns, tokens
        self._free_turns, self._free_tokens = turns, tokens
        self._pending = 0
        self._given_back = asyncio.Event()
        self.exhausted: StopReason | None = None

    async def take(self, tokens: int) -> int:
        """Take a turn and up to `tokens` tokens; waits while other requests hold all that are left.

        Raises:
            BudgetExhausted: no turn or no token is left.
        """
        while True:
            if self._free_turns > 0 and self._free_tokens > 0:
                granted = min(tokens, self._free_tokens)
                self._free_turns -= 1
                self._free_tokens -= granted
                self._pending += 1
                return granted
            if self._free_turns < 1 and not self._pending:
                raise self.refusal(StopReason.MAX_TURNS, f"the episode's {self._turns} turns are used up")
            if not self._pending:
                raise self.refusal(StopReason.MAX_TOKENS, f"the episode's {self._tokens} sampled tokens are used up")
            await self._given_back.wait()

    def settle(self, granted: int, used: int | None) -> None:
        """End what `take` began: `used` tokens were sampled, or None for a turn that failed and costs nothing."""
        self._pending -= 1
        self._free_tokens += granted - (used or 0)
        self._free_turns += used is None
        self._given_back.set()
        self._given_back = asyncio.Event()

    def refusal(self, reason: StopReason, message: str) -> BudgetExhausted:
        self.exhausted = self.exhausted or reason
        return BudgetExhausted(f"{message}: end the episode here", stop_reason=reason.value)
