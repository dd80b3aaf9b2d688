"""After a load of every kind, and clients that misbehave in every way: no session, no task, no descriptor is left."""

import asyncio
import contextlib
import json
import random
from typing import Any

import httpx
import openai
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import Recorder
from sparring.backend.gateway.http import GatewayServer

END = "<|im_end|>"
SAMPLING = SamplingParams(max_new_tokens=256, temperature=0.7)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SAYS = ("Five.", CALL, "<think>\nHm.\n</think>\n\nYes.", "<tool_call>{", "So:\n" + CALL + CALL)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "2 + 3?"}]
CHAT = {"messages": HELLO, "tools": TOOLS}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "2 + 3?"},
    "/v1/messages": {"model": "policy", "max_tokens": 50, "messages": HELLO},
}


class Client:
    """Plays one session at a time, well or badly."""

    def __init__(self, server: GatewayServer, http: httpx.AsyncClient, chance: random.Random) -> None:
        self._server, self._http, self._chance = server, http, chance
        self._admin = {"authorization": f"Bearer {server.admin_key}"}

    async def episode(self) -> None:
        session_id, key = await self._start()
        headers = {"authorization": f"Bearer {key}"}
        ways = (self._ask, self._stream, self._walk_away, self._hang_up, self._talk_nonsense)
        for way in self._chance.choices(ways, k=3):
            await way(headers)
        async with openai.AsyncOpenAI(base_url=self._server.base_url, api_key=key, max_retries=0) as api:
            await self._converse(api)
        await self._http.post("/rl/set_reward", json={"reward": 1}, headers=headers)
        await self._http.post("/rl/end_session", headers=headers)
        assert (await self._export(session_id))["interactions"]

    async def abandoned(self) -> None:
        """A session whose agent goes away in mid-request, and that nobody ends."""
        session_id, key = await self._start(deadline_s=0.2)
        await self._hang_up({"authorization": f"Bearer {key}"})
        assert (await self._export(session_id))["failure"]["kind"] == "deadline"

    async def _start(self, **fields: float) -> tuple[str, str]:
        started = await self._http.post("/rl/start_session", json={"task_id": "task"} | fields, headers=self._admin)
        return started.json()["session_id"], started.json()["api_key"]

    async def _export(self, session_id: str) -> dict[str, Any]:
        body = {"session_id": session_id, "style": self._chance.choice(["individual", "concat"])}
        exported = await self._http.post("/export_trajectories", json=body, headers=self._admin)
        assert exported.status_code == 200
        return exported.json()

    async def _ask(self, headers: dict[str, str]) -> None:
        for path, body in BODIES.items():
            assert (await self._http.post(path, json=body, headers=headers)).status_code == 200

    async def _stream(self, headers: dict[str, str]) -> None:
        for path, body in BODIES.items():
            answer = await self._http.post(path, json=body | {"stream": True}, headers=headers)
            assert answer.text.strip().splitlines()[-1].startswith("data: ")

    async def _walk_away(self, headers: dict[str, str]) -> None:
        """Leave a stream after its first bytes."""
        body = CHAT | {"stream": True, "n": 2}
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            async for _ in answer.aiter_bytes():
                break

    async def _hang_up(self, headers: dict[str, str]) -> None:
        """Give up before the answer."""
        with contextlib.suppress(httpx.TimeoutException):
            async with httpx.AsyncClient(base_url=self._http.base_url, timeout=0.003) as hasty:
                await hasty.post("/v1/chat/completions", json=CHAT | {"n": 3}, headers=headers)

    async def _talk_nonsense(self, headers: dict[str, str]) -> None:
        for content in (b"{", b"\xff", b"[]", json.dumps(CHAT | {"n": -1}).encode()):
            assert (await self._http.post("/v1/chat/completions", content=content, headers=headers)).status_code == 400
        assert (await self._http.post("/v1/chat/completions", json=CHAT)).status_code == 401

    async def _converse(self, api: openai.AsyncOpenAI) -> None:
        messages = list(HELLO)
        for _ in range(4):
            answer = await api.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            calls = said.tool_calls or ()
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            if not calls:
                messages += HELLO


@pytest.mark.parametrize(
    "episodes",
    [
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
async def test_a_load_of_every_kind_leaves_nothing(chat, ids, leaves_nothing, episodes):
    chance = random.Random(episodes)
    answers = [ids(text + END) for text in SAYS]
    async with leaves_nothing():
        engine = ScriptedEngine(lambda _: chance.choice(answers))
        await engine.start()
        recorder = Recorder(engine, chat, SAMPLING, max_length=8192)
        async with GatewayServer(recorder) as server:
            address = server.base_url.removesuffix("/v1")
            async with leaves_nothing(), httpx.AsyncClient(base_url=address, timeout=60) as http:
                room = asyncio.Semaphore(8)

                async def play() -> None:
                    async with room:
                        client = Client(server, http, chance)
                        await (client.episode() if chance.random() < 0.9 else client.abandoned())

                await asyncio.gather(*(play() for _ in range(episodes)))
            assert recorder.totals.sessions == episodes
            assert not recorder.sessions
            assert not recorder._keys
            assert not any(vars(server._ledger)[kept] for kept in ("_timers", "_finished", "_ended"))
            assert engine._running == 0
        await recorder.aclose()
