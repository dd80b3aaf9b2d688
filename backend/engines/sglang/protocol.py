"""SGLang's `/generate`, as pure functions: what is asked, what the answer means, and what cannot be asked honestly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparring.backend.engines.base import FinishReason, SamplingParams
from sparring.backend.engines.remote.reply import Leg, Reply, refusal
from sparring.errors import EngineError

__all__ = ["ServerInfo", "check_sampling", "cuts_support", "generate_body", "parse_reply", "parse_server_info"]

# More than any vocabulary, less than the value that SGLang takes for "off": asks for the sampling mask without a cut.
_WHOLE_VOCABULARY = 1 << 24


_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


@dataclass(frozen=True)
class ServerInfo:
    """What `/server_info` and `/model_info` say about a running server.

    Attributes:
        version: of SGLang.
        weight_version: of the weights it holds; 0 where it names none of ours.
        deterministic: started with deterministic inference, without which SGLang ignores a request's seed.
        gpu: the first that it lies on, and `ranks`, on how many.
        dtype: of its weights, where it was told one; None: the model's own.
    """

    version: str
    model_path: str
    architectures: tuple[str, ...]
    weight_version: int
    deterministic: bool
    skips_tokenizer: bool
    gpu: int = 0
    ranks: int = 1
    dtype: str | None = None


def parse_server_info(server: Mapping[str, Any], model: Mapping[str, Any], url: str) -> ServerInfo:
    """
    Raises:
        EngineError: whatever answers at `url`, it is not SGLang.
    """
    if "model_path" not in model or "version" not in server:
        raise EngineError(
            f"what answers at {url} is not an SGLang server (no model_path and version in its /model_info and "
            "/server_info): check the port"
        )
    weight_version = str(model.get("weight_version"))
    return ServerInfo(
        version=str(server["version"]),
        model_path=str(model["model_path"]),
        architectures=tuple(model.get("architectures") or ()),
        weight_version=int(weight_version) if weight_version.isdecimal() else 0,
        deterministic=bool(server.get("enable_deterministic_inference")),
        skips_tokenizer=bool(server.get("skip_tokenizer_init")),
        gpu=int(server.get("base_gpu_id") or 0),
        ranks=int(server.get("tp_size") or 1),
        dtype=_DTYPES.get(str(server.get("dtype"))),
    )


def check_sampling(sampling: SamplingParams, server: ServerInfo) -> None:
    """Refuse what this server would quietly not do.

    Raises:
        EngineError: with the reason and the way out.
    """
    if sampling.seed is not None and not server.deterministic:
        raise EngineError(
            "a request with a seed needs a server with deterministic inference, since SGLang ignores the seed "
            "otherwise: set engine.deterministic=true, or leave the seed away"
        )
    if sampling.stop and server.skips_tokenizer:
        raise EngineError(
            f"stop strings {list(sampling.stop)} need the server's tokenizer, and it was started with "
            "--skip-tokenizer-init: start it without, or stop by token ids"
        )


def cuts_support(sampling: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p take words away, so that the plain log-probability is not the one sampled from."""
    return sampling.temperature > 0 and bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)


def generate_body(leg: Leg, *, stream: bool) -> dict[str, Any]:
    """The JSON of one request.

    SGLang reports the log-probability after temperature and before top-k, top-p and min-p. Where those are set, the
    request asks for the sampling mask, with which the server also gives the renormalised log-probability; it wants a
    finite top-k for that.
    """
    sampling = leg.sampling
    params: dict[str, Any] = {
        "max_new_tokens": leg.room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": leg.rid,
        "input_ids": leg.token_ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
        "extra_key": leg.cache_salt,
    }
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if cuts_support(sampling):
        params["top_k"] = sampling.top_k or _WHOLE_VOCABULARY
        body["return_sampling_mask"] = True
    return body


def parse_reply(data: Mapping[str, Any], sampling: SamplingParams) -> Reply:
    """The `Reply` of one JSON object of `/generate`.

    Raises:
        EngineError: the server refused, or its answer lacks what training needs.
    """
    if "meta_info" not in data:
        raise EngineError(f"SGLang refused a request: {refusal(data) or str(data)[:500]}")
    meta = data["meta_info"]
    finish = meta.get("finish_reason")
    if finish is not None and finish["type"] == "abort" and finish.get("status_code"):
        raise EngineError(f"SGLang refused a request: {finish.get('message')} (status {finish['status_code']})")
    pairs = meta.get("output_token_logprobs") or []
    if finish is None and not pairs:
        return Reply(token_ids=data.get("output_ids") or [])
    token_ids = [pair[1] for pair in pairs]
    if finish is not None and finish["type"] != "abort" and not token_ids:
        raise EngineError("SGLang answered without log-probabilities, and they cannot be had later")
    logprobs = [pair[0] for pair in pairs]
    if cuts_support(sampling) and token_ids:
        logprobs = (meta.get("output_token_sampling_logprobs") or [])[: len(token_ids)]
        if len(logprobs) != len(token_ids):
            raise EngineError(
                "this SGLang server gives no log-probabilities under top_p, top_k or min_p, so what it reports would "
                "not be what it sampled from: use SGLang 0.5.17 or later, or sample with temperature alone"
            )
    if any(value is None or value != value for value in logprobs):
        raise EngineError("SGLang reported a log-probability that is not a number: are the weights finite?")
    alternatives = None
    if sampling.top_logprobs:
        tops = meta.get("output_top_logprobs") or []
        alternatives = [[(entry[1], entry[0]) for entry in position or ()] for position in tops[: len(token_ids)]]
    matched = finish.get("matched") if finish is not None else None
    return Reply(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=meta["policy_versions"][: len(token_ids)] if "policy_versions" in meta else None,
        finish_reason=None if finish is None else _FINISH.get(finish["type"], "stop"),
        stop_string=matched if isinstance(matched, str) else None,
        top_logprobs=alternatives,
    )


_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
