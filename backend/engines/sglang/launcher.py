"""Runs inside the SGLang server's own Python, as a script: `python -P launcher.py <arguments of sglang.launch_server>`.

It adds to the server, and imports nothing of sparring:

- Which weights sampled each token. SGLang reports one `weight_version` a request, that of the moment it ends, but a
  request may live through an update. A hook on the weight updates (SGLang's own plugin registry) notes, for every live
  request, how many tokens it has by then; `meta_info.policy_versions` of each answer says the version of each token.
- What weights it holds: `/weights_checker` knows one action more, which answers with a checksum of each parameter
  (`checksum.py` beside this file). SGLang's own checksums can be compared with those of its own tensors alone, which
  it joins and fills up.
- Whether a batch must sort its vocabulary, from the requests that it has. SGLang takes a greedy request among sampled
  ones for one with `top_k` = 1, sorts all rows for it, and goes on so until the batch is empty, which under training it
  never is: after one evaluation all that followed was sampled at two thirds of the rate.
- The server ends with the process that started it. Its standard input is a pipe from there; when that closes, the
  whole process group is killed, so that no server is left holding the GPU after a crash.

Scheduler processes are spawned and import this file as `__mp_main__`, so what stands at its top level runs there too.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

INFO_KEY = "policy_versions"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = ("disk", "tensor", "distributed", "ipc")
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_NO_TOP_K = 1 << 30  # as SGLang writes it; 1 stands for greedy too


class TokenVersions:
    """The version of each token of a request, as a sequence that SGLang slices; what is kept are the changes alone."""

    def __init__(self, version: int) -> None:
        self._marks = [(0, version)]

    def mark(self, tokens: int, version: int) -> None:
        """From token number `tokens` on, the version is `version`."""
        while self._marks and self._marks[-1][0] >= tokens:
            self._marks.pop()
        self._marks.append((tokens, version))

    def __getitem__(self, span: slice) -> list[int]:
        ends = [start for start, _ in self._marks[1:]] + [span.stop]
        versions: list[int] = []
        for (start, version), end in zip(self._marks, ends, strict=True):
            versions += [version] * (min(end, span.stop) - max(start, span.start))
        return versions


class _Current:
    version = 0


def _begin_request(_result: None, request: Any, *_args: Any, **_kwargs: Any) -> None:
    request.customized_info = {INFO_KEY: TokenVersions(_Current.version)}


def _update(original: Any, updater: Any, message: Any) -> Any:
    import torch

    torch.cuda.synchronize()  # a forward pass that was launched before the pause still reads the old weights
    result = original(updater, message)
    if result.success and (message.weight_version or "").isdecimal():
        _Current.version = int(message.weight_version)
        mark_requests(updater.scheduler, _Current.version)
    return result


def mark_requests(scheduler: Any, version: int) -> None:
    """Note for every live request that its next token is of `version`.

    A batch whose result the scheduler has launched and not yet looked at gave each of its requests one more token of
    the old weights, except those whose prompt is not through.
    """
    pending = [batch for batch, _ in getattr(scheduler, "result_queue", ())]
    batches = [scheduler.running_batch, scheduler.last_batch, *pending]
    live = {id(request): request for batch in batches if batch is not None for request in batch.reqs}
    live |= {id(request): request for request in scheduler.waiting_queue}
    if scheduler.chunked_req is not None:
        live[id(scheduler.chunked_req)] = scheduler.chunked_req
    launched = {id(request) for batch in pending for request in batch.reqs if request is not scheduler.chunked_req}
    for key, request in live.items():
        request.customized_info[INFO_KEY].mark(len(request.output_ids) + (key in launched), version)


def tell_sampling(_result: None, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """What the requests of a batch need of the sampler, told anew when some have come or gone."""
    info = batch.sampling_info
    kinds = {(p.top_k, p.top_p, p.min_p) for p in (request.sampling_params for request in batch.reqs)}
    if info is None or not kinds:
        return
    drawn = {kind for kind in kinds if kind[0] > 1}
    info.is_all_greedy, info.is_any_greedy = not drawn, drawn != kinds
    sorts = drawn if _takes_greedy_ones_apart() else kinds
    info.need_top_k_sampling = any(top_k != _NO_TOP_K for top_k, _, _ in sorts)
    info.need_top_p_sampling = any(top_p != 1.0 for _, top_p, _ in sorts)
    info.need_min_p_sampling = any(min_p > 0 for _, _, min_p in sorts)


def sample(
    original: Any, sampler: Any, probs: Any, sampling_info: Any, positions: Any, simple_sampling_case: bool
) -> Any:
    """Where rows of `probs` (requests, vocabulary) are drawn from whole, greedy requests get their likeliest token."""
    tokens = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    if simple_sampling_case and sampling_info.is_any_greedy:
        tokens = probs.argmax(-1).to(tokens.dtype).where(sampling_info.top_ks <= 1, tokens)
    return tokens


@cache
def _takes_greedy_ones_apart() -> bool:
    """Whether `sample` is in its place: SGLang only logs that it found none for a hook."""
    from sglang.srt.layers.sampler import Sampler

    return hasattr(getattr(Sampler, "_sample_from_probs", None), "__wrapped__")


@cache
def _checksums() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).with_name("checksum.py")))


def _check(original: Any, updater: Any, message: Any) -> Any:
    if message.action != _checksums()["ACTION"]:
        return original(updater, message)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        found = _checksums()["parameter_checksums"](updater.tp_worker.model_runner.model.named_parameters())
    except Exception as error:  # one that leaves here ends the scheduler, and the server with it
        return CheckWeightsReqOutput(success=False, message=f"{type(error).__name__}: {error}")
    return CheckWeightsReqOutput(success=True, message=json.dumps(found))


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.schedule_batch.Req.__init__", _begin_request, HookType.AFTER)
    for change in ("prepare_for_extend", "filter_batch", "merge_batch"):
        HookRegistry.register(f"{_BATCH}.{change}", tell_sampling, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sample, HookType.AROUND)
    for source in _UPDATES:
        HookRegistry.register(f"{_UPDATER}.update_weights_from_{source}", _update, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.check_weights", _check, HookType.AROUND)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    _register_hooks()
if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
