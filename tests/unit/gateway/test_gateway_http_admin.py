"""Sessions driven from outside, the server's own life, and what hostile or mistaken clients get."""

import asyncio
import socket

import pytest

from sparring.backend.gateway.http import GatewayServer
from sparring.backend.gateway.http.body import MAX_BODY_BYTES
from sparring.backend.gateway.http.ledger import SessionLimits
from sparring.errors import ConfigError

END = "<|im_end|>"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "2 + 3?"}]}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


async def start(http, server, task="task", **body):
    answer = await http.post("/rl/start_session", json={"task_id": task} | body, headers=bearer(server.admin_key))
    answer.raise_for_status()
    return answer.json()["session_id"], bearer(answer.json()["api_key"])


async def export(http, server, session_id, **body):
    return await http.post(
        "/export_trajectories", json={"session_id": session_id} | body, headers=bearer(server.admin_key)
    )


async def play(http, key, turns):
    messages = list(HELLO["messages"])
    for _ in range(turns):
        answer = await http.post("/v1/chat/completions", json=HELLO | {"messages": messages}, headers=key)
        messages += [answer.raise_for_status().json()["choices"][0]["message"], *HELLO["messages"]]
    return answer.json()["id"]


async def test_an_episode_from_start_to_export(serve, chat):
    async with serve("a" + END, "b" + END, "c" + END) as (server, recorder, http):
        session_id, key = await start(http, server)
        assert session_id == "task-0"
        last = await play(http, key, 3)
        assert (await http.post("/rl/set_reward", json={"reward": 10}, headers=key)).status_code == 200
        ended = await http.post("/rl/end_session", headers=key)
        assert ended.json() == {"message": "success", "interaction_count": 3}
        assert not recorder.sessions
        answer = (await export(http, server, session_id, discount=0.9)).json()
        interactions = answer["interactions"]
        assert [round(sample["reward"], 6) for sample in interactions.values()] == [8.1, 9, 10]
        assert list(interactions)[-1] == last
        arrays = interactions[last]["tensor_dict"]
        sampled = [id_ for id_, mask in zip(arrays["input_ids"], arrays["loss_mask"], strict=True) if mask]
        assert chat.decode(sampled, special_tokens=True) == "c" + END
        assert (await export(http, server, session_id)).status_code == 404


async def test_concat_exports_the_leaves(serve):
    async with serve("a" + END, "b" + END) as (server, _, http):
        session_id, key = await start(http, server)
        last = await play(http, key, 2)
        await http.post("/rl/set_reward", json={"reward": 1.5, "interaction_id": last}, headers=key)
        await http.post("/rl/end_session", headers=key)
        interactions = (await export(http, server, session_id, style="concat")).json()["interactions"]
        assert [(id_, sample["reward"]) for id_, sample in interactions.items()] == [(last, 1.5)]
        assert sum(interactions[last]["tensor_dict"]["loss_mask"]) == 4


async def test_the_second_of_two_rewards_stands(serve):
    async with serve("a" + END) as (server, _, http):
        session_id, key = await start(http, server)
        await play(http, key, 1)
        for reward in (1, 2):
            await http.post("/rl/set_reward", json={"reward": reward}, headers=key)
        await http.post("/rl/end_session", headers=key)
        [sample] = (await export(http, server, session_id)).json()["interactions"].values()
        assert sample["reward"] == 2


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"reward": NaN}', 400),
        (b'{"reward": 1e999}', 400),
        (b'{"reward": "1"}', 422),
        (b'{"reward": null}', 422),
        (b"{}", 422),
        (b'{"reward": 1, "interaction_id": "unknown"}', 400),
        (b'{"reward": \xff}', 400),
        (b"[]", 400),
        (b"[" * 100_000, 400),
    ],
)
async def test_what_is_no_reward(serve, content, status):
    async with serve("a" + END) as (server, _, http):
        _, key = await start(http, server)
        await play(http, key, 1)
        assert (await http.post("/rl/set_reward", content=content, headers=key)).status_code == status


async def test_a_reward_before_any_interaction(serve):
    async with serve() as (server, _, http):
        _, key = await start(http, server)
        assert (await http.post("/rl/set_reward", json={"reward": 1}, headers=key)).status_code == 400


async def test_keys(serve):
    async with serve() as (server, _, http):
        admin = bearer(server.admin_key)
        _, key = await start(http, server, api_key="my-own-key")
        assert key == bearer("my-own-key")

        async def status(path, body, headers):
            return (await http.post(path, json=body, headers=headers)).status_code

        chat = "/v1/chat/completions"
        assert await status(chat, HELLO, {}) == 401
        assert await status(chat, HELLO, bearer("unknown")) == 401
        assert await status(chat, HELLO, admin) == 400
        assert await status("/rl/start_session", {"task_id": "t"}, key) == 403
        assert await status("/rl/start_session", {"task_id": "t"}, {}) == 401
        assert await status("/rl/start_session", {}, admin) == 422
        assert await status("/rl/start_session", {"task_id": "t", "api_key": server.admin_key}, admin) == 400
        assert await status("/rl/start_session", {"task_id": "t", "api_key": "my-own-key"}, admin) == 409
        assert await status("/export_trajectories", {"session_id": "task-0"}, key) == 403
        assert await status("/export_trajectories", {}, admin) == 422
        assert await status("/export_trajectories", {"session_id": "unknown"}, admin) == 404
        assert await status("/grant_capacity", {}, key) == 403
        assert await status("/rl/end_session", {}, key) == 200
        assert await status(chat, HELLO, key) == 410
        assert await status("/rl/end_session", {}, key) == 410
        assert await status("/rl/start_session", {"task_id": "t", "api_key": "my-own-key"}, admin) == 200


async def test_capacity_is_asked_for_at_the_start_alone(serve):
    async with serve("a" + END, capacity=1) as (server, _, http):
        admin = bearer(server.admin_key)
        _, key = await start(http, server)
        refused = await http.post("/rl/start_session", json={"task_id": "task"}, headers=admin)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        await play(http, key, 1)
        assert (await http.post("/grant_capacity", headers=admin)).json() == {"capacity": 1}
        assert (await start(http, server))[0] == "task-1"


async def test_capacity_that_nobody_limited_stays_so(serve):
    async with serve("a" + END) as (server, _, http):
        admin = bearer(server.admin_key)
        assert (await http.post("/grant_capacity", headers=admin)).json() == {"capacity": None}
        for n in range(3):
            assert (await start(http, server))[0] == f"task-{n}"


async def test_a_session_left_open_ends_at_its_deadline_as_a_failure(serve):
    limits = SessionLimits(deadline_s=0.2)
    async with serve("a" + END, limits=limits) as (server, recorder, http):
        session_id, key = await start(http, server)
        await play(http, key, 1)
        answer = (await export(http, server, session_id)).json()
        assert answer["failure"]["kind"] == "deadline"
        assert len(answer["interactions"]) == 1
        assert not recorder.sessions


async def test_ending_over_http_leaves_the_record_to_the_owner_in_process(serve, open_session):
    async with serve("a" + END) as (_, recorder, http):
        session = open_session(recorder)
        await play(http, bearer(session.api_key), 1)
        assert (await http.post("/rl/end_session", headers=bearer(session.api_key))).status_code == 200
        late = await http.post("/v1/chat/completions", json=HELLO, headers=bearer(session.api_key))
        assert late.status_code == 410
        assert recorder.close_session("episode-1").usage.turns == 1


async def test_a_body_that_is_too_large_is_not_read(serve):
    async with serve() as (server, _, http):
        _, key = await start(http, server)
        body = b"x" * (MAX_BODY_BYTES + 1)
        assert (await http.post("/v1/chat/completions", content=body, headers=key)).status_code == 413

        async def parts():
            for _ in range(17):
                yield b"x" * 2**20

        assert (await http.post("/v1/chat/completions", content=parts(), headers=key)).status_code == 413


async def test_a_body_that_does_not_come_is_given_up(serve, monkeypatch):
    monkeypatch.setattr("sparring.backend.gateway.http.body._BODY_TIMEOUT_S", 0.05)
    async with serve() as (server, _, http):
        _, key = await start(http, server)
        port = int(server.base_url.split(":")[2].removesuffix("/v1"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {key['authorization']}\r\n"
        writer.write(f"{head}Content-Length: 10\r\n\r\n{{".encode())
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_health_models_and_metrics(serve, open_session):
    async with serve("a" + END) as (_, recorder, http):
        await play(http, bearer(open_session(recorder).api_key), 1)
        assert (await http.get("/health")).json()["sessions"] == 1
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["policy"]
        metrics = (await http.get("/metrics")).text
        assert "sparring_sampled_tokens_total 2.0" in metrics
        assert 'sparring_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in metrics
        recorder.engine.crash("the machine is gone")
        sick = await http.get("/health")
        assert (sick.status_code, sick.json()["detail"]) == (503, "the machine is gone")


async def test_twenty_clients_of_one_session_at_once(serve, open_session):
    async with serve(*["a" + END] * 20) as (_, recorder, http):
        key = bearer(open_session(recorder).api_key)
        await asyncio.gather(*(play(http, key, 1) for _ in range(20)))
        record = recorder.close_session("episode-1")
        assert len(record.sequences) == 20
        assert record.usage.completion_tokens == 40


async def test_an_agent_that_never_stops_meets_its_budget(serve, open_session):
    async with serve(*["a" + END] * 5) as (_, recorder, http):
        key = bearer(open_session(recorder, turn_budget=5).api_key)
        statuses = [(await http.post("/v1/chat/completions", json=HELLO, headers=key)).status_code for _ in range(8)]
        assert statuses == [200] * 5 + [400] * 3


async def test_a_port_in_use_says_so(serve, open_recorder):
    async with open_recorder() as recorder:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use"):
                await GatewayServer(recorder, port=port).start()
        with pytest.raises(ConfigError, match="65535"):
            await GatewayServer(recorder, port=70_000).start()


async def test_connections_do_not_wait_to_fill_a_packet(open_recorder):
    async with open_recorder() as recorder, GatewayServer(recorder) as server:
        [listener] = server._server.servers[0].sockets
        port = listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        [connection] = server._server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


async def test_a_guessable_admin_key_stays_on_loopback(open_recorder):
    async with open_recorder() as recorder:
        for key in ("short", "areal-admin-key"):
            GatewayServer(recorder, admin_key=key)
            with pytest.raises(ConfigError, match="admin key"):
                GatewayServer(recorder, host="0.0.0.0", admin_key=key)


async def test_stopping_is_idempotent_and_leaves_no_task(open_recorder):
    async with open_recorder() as recorder:
        before = asyncio.all_tasks()
        server = GatewayServer(recorder)
        await server.start()
        assert recorder.base_url == server.base_url
        await server.stop()
        await server.stop()
        assert recorder.base_url is None
        assert asyncio.all_tasks() == before
