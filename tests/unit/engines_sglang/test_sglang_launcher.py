"""The hooks inside SGLang's scheduler: which weights sampled which token, and what a batch needs of the sampler."""

import subprocess
import sys
from types import SimpleNamespace as Thing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.engines.sglang import launcher
from sparring.backend.engines.sglang.launcher import INFO_KEY, TokenVersions, mark_requests, sample, tell_sampling


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 60), st.integers(0, 60))
def test_slices_agree_with_the_list_that_they_stand_for(updates, start, stop):
    versions, plain = TokenVersions(0), [0] * 60
    for version, tokens in enumerate(sorted(updates), start=1):
        versions.mark(tokens, version)
        plain[tokens:] = [version] * (60 - tokens)
    start, stop = sorted((start, stop))
    assert versions[start:stop] == plain[start:stop]


def request(tokens):
    return Thing(output_ids=list(range(tokens)), customized_info={INFO_KEY: TokenVersions(0)})


def versions(req, tokens):
    return req.customized_info[INFO_KEY][0:tokens]


def scheduler(running=(), waiting=(), chunked=None, launched=()):
    last = Thing(reqs=list(launched)) if launched else None
    return Thing(
        running_batch=Thing(reqs=list(running)),
        last_batch=last,
        waiting_queue=list(waiting),
        chunked_req=chunked,
        result_queue=[(last, object())] if launched else [],
    )


def test_a_running_request_changes_at_its_next_token():
    req = request(3)
    mark_requests(scheduler(running=[req]), 5)
    assert versions(req, 6) == [0, 0, 0, 5, 5, 5]


def test_a_token_that_was_launched_before_the_update_is_of_the_old_weights():
    req = request(3)
    mark_requests(scheduler(running=[req], launched=[req]), 5)
    assert versions(req, 6) == [0, 0, 0, 0, 5, 5]


def test_a_waiting_request_is_all_of_the_new_weights():
    req = request(0)
    mark_requests(scheduler(waiting=[req]), 5)
    assert versions(req, 2) == [5, 5]


def test_a_prompt_half_read_has_no_token_under_way():
    req = request(0)
    mark_requests(scheduler(chunked=req, launched=[req]), 5)
    assert versions(req, 2) == [5, 5]


NO_TOP_K = 1 << 30
SAMPLED, GREEDY, CUT = (NO_TOP_K, 1.0, 0.0), (1, 1.0, 0.0), (NO_TOP_K, 0.9, 0.0)


def told(*kinds, apart, monkeypatch):
    """The flags of a batch that once held everything, and now holds these."""
    monkeypatch.setattr(launcher, "_takes_greedy_ones_apart", lambda: apart)
    flags = ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling")
    info = Thing(is_all_greedy=False, is_any_greedy=True, **dict.fromkeys(flags, True))
    params = [Thing(top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in kinds]
    tell_sampling(None, Thing(sampling_info=info, reqs=[Thing(sampling_params=p) for p in params]))
    return (
        {flag.removeprefix("need_").removesuffix("_sampling") for flag in flags if getattr(info, flag)},
        info.is_any_greedy,
        info.is_all_greedy,
    )


@pytest.mark.parametrize(
    ("kinds", "sorts", "any_greedy", "all_greedy"),
    [
        ([SAMPLED, SAMPLED], set(), False, False),
        ([SAMPLED, GREEDY], set(), True, False),
        ([GREEDY, GREEDY], set(), True, True),
        ([SAMPLED, CUT], {"top_p"}, False, False),
        ([GREEDY, (20, 1.0, 0.0)], {"top_k"}, True, False),
        ([SAMPLED, (NO_TOP_K, 1.0, 0.1)], {"min_p"}, False, False),
    ],
)
def test_what_a_batch_needs_follows_from_the_requests_that_it_has(kinds, sorts, any_greedy, all_greedy, monkeypatch):
    found, *greedy = told(*kinds, apart=True, monkeypatch=monkeypatch)
    assert found == sorts
    assert greedy == [any_greedy, all_greedy]


def test_a_server_whose_sampler_has_no_hook_sorts_for_greedy_ones_as_before(monkeypatch):
    assert told(SAMPLED, GREEDY, apart=False, monkeypatch=monkeypatch)[0] == {"top_k"}
    assert told(SAMPLED, SAMPLED, apart=False, monkeypatch=monkeypatch)[0] == set()


def test_an_empty_batch_keeps_what_it_was_told():
    info = Thing(need_top_k_sampling=True)
    tell_sampling(None, Thing(sampling_info=info, reqs=[]))
    assert info.need_top_k_sampling


def test_greedy_rows_among_sampled_ones_get_their_likeliest_token():
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    drawn = torch.tensor([0, 0, 2], dtype=torch.int32)
    info = Thing(is_any_greedy=True, top_ks=torch.tensor([1, NO_TOP_K, 1], dtype=torch.int32))

    def original(_sampler, _probs, _info, _positions, _simple):
        return drawn

    found = sample(original, None, probs, info, None, True)
    assert found.tolist() == [2, 0, 1]
    assert found.dtype == torch.int32
    assert sample(original, None, probs, info, None, False) is drawn  # sorted: SGLang has cut them itself


def test_the_launcher_imports_nothing_of_ours():
    code = f"import runpy, sys; runpy.run_path({launcher.__file__!r}); print([m for m in sys.modules if 'spar' in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "[]"
