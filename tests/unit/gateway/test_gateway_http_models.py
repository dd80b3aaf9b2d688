"""Which model a name means: any name is the policy's, unless the run says by which names it may be asked for."""

import openai
import pytest

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine

END = "<|im_end|>"
HELLO = [{"role": "user", "content": "2 + 3?"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "2 + 3?"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


def client_of(session):
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_hard_codes_a_name_works_unchanged(serve, open_session, path, stream):
    async with serve("Five." + END) as (_, recorder, http):
        key = {"authorization": f"Bearer {open_session(recorder).api_key}"}
        answer = await http.post(path, json=BODIES[path] | {"model": "gpt-4o", "stream": stream}, headers=key)
        assert answer.status_code == 200
        assert '"model":"gpt-4o"' in answer.text.replace(" ", "")
        assert recorder.close_session("episode-1").usage.turns == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_name_that_the_run_does_not_list_is_no_model(serve, open_session, path, stream):
    async with serve("Five." + END, aliases=["gpt-4o"]) as (_, recorder, http):
        key = {"authorization": f"Bearer {open_session(recorder).api_key}"}
        body = BODIES[path] | {"stream": stream}
        refused = await http.post(path, json=body | {"model": "gpt-4"}, headers=key)
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert "'gpt-4'" in error["message"]
        assert "policy, gpt-4o" in error["message"]
        if path != "/v1/messages":
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await http.post(path, json=body | {"model": "gpt-4o"}, headers=key)).status_code == 200
        assert recorder.close_session("episode-1").usage.turns == 1


async def test_a_request_without_a_model_means_the_policy(serve, open_session):
    async with serve("a" + END, "b" + END, aliases=[]) as (_, recorder, http):
        key = {"authorization": f"Bearer {open_session(recorder).api_key}"}
        for path in ("/v1/chat/completions", "/v1/responses"):
            answer = await http.post(path, json=BODIES[path], headers=key)
            assert (answer.status_code, answer.json()["model"]) == (200, "policy")


async def test_models_are_listed_and_looked_up(serve, open_session, chat):
    async with serve(aliases=["org/gpt-4o"]) as (_, recorder, _), client_of(open_session(recorder)) as api:
        judge = ScriptedEngine([])
        recorder.add_frozen("judge", judge, chat, SamplingParams(), max_length=100)
        assert [model.id for model in (await api.models.list()).data] == ["policy", "judge", "org/gpt-4o"]
        for name in ("policy", "judge", "org/gpt-4o"):
            found = await api.models.retrieve(name)
            assert (found.id, found.object) == (name, "model")
        with pytest.raises(openai.NotFoundError) as caught:
            await api.models.retrieve("gpt-4")
        assert caught.value.code == "model_not_found"


async def test_where_any_name_is_the_policy_s_any_is_there(serve, open_session):
    async with serve() as (_, recorder, _), client_of(open_session(recorder)) as api:
        assert [model.id for model in (await api.models.list()).data] == ["policy"]
        assert (await api.models.retrieve("gpt-4o")).id == "gpt-4o"
