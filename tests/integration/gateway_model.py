"""The embedded engine on SmolLM2 behind a served recorder, with a log of all that it sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparring.agents.policy import Outcome, Policy
from sparring.agents.runner import make_runner
from sparring.backend.engines.base import Chunk, Completion, SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.gateway import ChatFormat, Recorder, Session, SessionRecord
from sparring.backend.gateway.http import GatewayServer
from sparring.envs import ChatEnv
from sparring.types import ChatClient, EpisodeResult, EpisodeSpec, StopReason

ENV_ID = "sparring/Calculator-v0"


class LoggedEngine(TorchEngine):
    """Keeps (prompt, completion) of every request, in the order in which they ended."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[tuple[list[int], Completion]] = []

    async def stream(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        async for chunk in super().stream(token_ids, sampling, session_id=session_id):
            if chunk.completion is not None:
                self.log.append((list(token_ids), chunk.completion))
            yield chunk


class Replay:
    """Steps an environment by given texts, and ends the episode where they end, as a budget would."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    async def play(self, env: ChatEnv, client: ChatClient) -> Outcome:
        for text in self._texts:
            await env.astep(text)
        env.truncate(StopReason.MAX_TOKENS)
        return Outcome(env.stop_reason or StopReason.ABORTED)


@dataclass
class Arena:
    """Plays episodes, and holds each to the engine's log and to the native loop."""

    engine: LoggedEngine
    recorder: Recorder
    server: GatewayServer
    number: int = 0

    def open(self, task_id: str, env_id: str = ENV_ID) -> tuple[EpisodeSpec, Session]:
        self.number += 1
        spec = EpisodeSpec(f"episode-{self.number}", "group", env_id, task_id, seed=0)
        self.engine.log.clear()
        return spec, self.recorder.open_session(spec.episode_id, turn_budget=8, token_budget=400)

    async def play(
        self, policy: Policy, task_id: str, env_id: str = ENV_ID
    ) -> tuple[EpisodeResult, SessionRecord]:
        spec, session = self.open(task_id, env_id)
        result = await make_runner(env_id, {}, policy, timeout_s=100)(spec, session)
        record = self.recorder.close_session(spec.episode_id)
        assert result.failure is None, result.failure
        assert_exact(record, self.engine.log)
        native = await self.native(spec, session)
        assert (result.reward, result.reward_parts) == (native.reward, native.reward_parts)
        return result, record

    async def native(self, spec: EpisodeSpec, session: Session) -> EpisodeResult:
        """What the native path gives for the texts that the engine has just sampled."""
        said = [self.recorder.chat.decode(completion.token_ids) for _, completion in self.engine.log]
        return await make_runner(spec.env_id, {}, Replay(said), timeout_s=10)(spec, session)


def assert_exact(record: SessionRecord, log: Sequence[tuple[list[int], Completion]]) -> None:
    """Every request of the engine is a turn of a sequence: tokens, log-probabilities, versions, in order."""
    assert log
    marks = [(sequence, turn) for sequence in record.sequences for turn in sequence.turns]
    assert len(marks) == len(log)
    unmatched = list(log)
    for sequence, turn in marks:
        ids = sequence.token_ids.tolist()
        index = next(
            i
            for i, (prompt, said) in enumerate(unmatched)
            if prompt == ids[: turn.start] and said.token_ids == ids[turn.start : turn.end]
        )
        _, said = unmatched.pop(index)
        span = slice(turn.start, turn.end)
        assert np.array_equal(sequence.behaviour_logprobs[span], np.array(said.logprobs, np.float32))
        assert sequence.policy_versions[span].tolist() == said.policy_versions
    for sequence in record.sequences:
        sampled = np.zeros(len(sequence), bool)
        for turn in sequence.turns:
            sampled[turn.start : turn.end] = True
        assert np.array_equal(sequence.action_mask, sampled)
        assert np.all(sequence.policy_versions[~sampled] == -1)


@asynccontextmanager
async def open_arena(folder: Any, *, tool_template: str = "hermes-compact", temperature: float = 0.7, seed: int = 1):
    engine = LoggedEngine(folder, slots=4, deterministic=True)
    await engine.start()
    chat = ChatFormat.load(folder, tool_template=tool_template)
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed)
    recorder = Recorder(engine, chat, sampling, max_length=2048)
    try:
        async with GatewayServer(recorder) as server:
            yield Arena(engine, recorder, server)
    finally:
        await recorder.aclose()
        await engine.stop()
