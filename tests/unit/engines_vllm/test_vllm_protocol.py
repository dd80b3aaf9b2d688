"""What is asked of vLLM and what its answers mean, by JSON as vLLM 0.33.0 writes it."""

import base64
import pickle
from types import SimpleNamespace

import pytest
import torch

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.remote.reply import Leg, Reply
from sparring.backend.engines.vllm.protocol import generate_body, parse_answer
from sparring.backend.engines.vllm.weights import StagedWeights, load_calls, stage
from sparring.errors import EngineError


def leg(**sampling):
    return Leg("r1", [1, 2], SamplingParams(**sampling), 8, 3, "salt.v3")


def answer(tokens, logprobs, finish="length", **choice):
    content = [
        {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
        for t, p in zip(tokens, logprobs, strict=True)
    ]
    choice = {"index": 0, "finish_reason": finish, "stop_reason": None, "token_ids": tokens, **choice}
    return {"request_id": "generate-tokens-r1", "choices": [{"logprobs": {"content": content}, **choice}]}


def test_a_request_asks_for_the_sampled_tokens_logprobs_under_its_own_salt():
    body = generate_body(leg(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(9,)), stream=False)
    assert body["token_ids"] == [1, 2]
    assert body["cache_salt"] == "salt.v3"
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.7, 0.9, 5, 0.1)
    assert (params["max_tokens"], params["stop_token_ids"], params["logprobs"]) == (8, [9], 0)
    assert "stop" not in params, "vLLM takes stop strings only where it decodes"
    assert generate_body(leg(stop=("x",)), stream=False)["sampling_params"]["detokenize"] is True


def test_spans_are_the_versions_of_the_tokens():
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 3}]
    reply = parse_answer(answer([5, 6, 7], [-1.0, -2.0, -3.0], weight_versions=spans), leg(), Reply())
    assert reply.versions == [0, 12, 12]
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ([5, 6, 7], [-1.0, -2.0, -3.0], "length")


def test_events_of_a_stream_add_up_and_the_last_has_the_versions():
    first = parse_answer(answer([5], [-1.0], None, weight_versions=None), leg(), Reply())
    spans = [{"version": "4", "start": 0, "end": 2}]
    last = parse_answer(answer([6], [-2.0], "stop", stop_reason=6, weight_versions=spans), leg(), first)
    assert (first.token_ids, first.versions, first.finish_reason) == ([5], None, None)
    assert (last.token_ids, last.logprobs, last.versions) == ([5, 6], [-1.0, -2.0], [4, 4])
    assert (last.finish_reason, last.stop_string) == ("stop", None)


def test_a_request_that_was_aborted_before_its_first_token_said_nothing():
    reply = parse_answer(answer([], [], "abort", weight_versions=[]), leg(), Reply())
    assert (reply.token_ids, reply.versions, reply.finish_reason) == ([], [], "aborted")


def test_alternatives_are_the_likeliest_without_the_impossible():
    data = answer([5], [-3.0], "stop", stop_reason="x")
    top = [(5, -3.0, 9), (1, -0.1, 1), (2, -2.5, 2), (3, -9999.0, 3)]
    data["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [
        {"token_id": token, "logprob": p, "rank": rank} for token, p, rank in top
    ]
    assert parse_answer(data, leg(top_logprobs=2), Reply()).top_logprobs == [[(1, -0.1), (2, -2.5)]]
    assert parse_answer(data, leg(top_logprobs=9), Reply()).top_logprobs == [[(1, -0.1), (2, -2.5), (5, -3.0)]]
    assert parse_answer(data, leg(), Reply()).stop_string == "x"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"error": {"message": "too long", "code": 400}}, "refused a request: too long"),
        ({"detail": "Not Found"}, "refused a request: Not Found"),
        ({}, "refused a request"),
        (answer([5], [-9999.0]), "are the weights finite"),
        (answer([5], [-1.0], "repetition"), "'repetition'"),
        ({"choices": [{"token_ids": [5], "logprobs": None, "finish_reason": "stop"}]}, "0 log-probabilities for 1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(data, said):
    with pytest.raises(EngineError, match=said):
        parse_answer(data, leg(), Reply())


async def test_a_folder_is_read_by_the_workers_and_then_labelled(tiny_qwen3):
    staged = await stage(8, tiny_qwen3, WeightLayout.of_model(tiny_qwen3), None)
    assert list(load_calls(staged)) == [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tiny_qwen3)}}),
        ("/update_weight_version", {"new_version": "8"}),
    ]


def test_tensors_on_the_gpu_are_sent_as_handles_between_start_and_finish(monkeypatch):
    """The handles themselves need a GPU: here those of tensors on the CPU stand for them."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    copies = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(4)}
    calls = dict(load_calls(StagedWeights(5, copies=copies)))
    assert list(calls) == ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert calls["/finish_weight_update"] == {"weight_version": "5"}
    info = calls["/update_weights"]["update_info"]
    assert (info["names"], info["dtype_names"], info["shapes"]) == (
        ["a", "b"],
        ["bfloat16", "float32"],
        [[2, 3], [4]],
    )
    handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))  # noqa: S301  # our own, two lines above
    assert [list(handle) for handle in handles] == [["GPU-1"], ["GPU-1"]]
    assert all(isinstance(handle["GPU-1"], tuple) for handle in handles)
