"""Which weights sampled which token, as the hook inside SGLang's scheduler counts it."""

import subprocess
import sys
from types import SimpleNamespace as Thing

from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.engines.sglang import launcher
from sparring.backend.engines.sglang.launcher import INFO_KEY, TokenVersions, mark_requests


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


def test_the_launcher_imports_nothing_of_ours():
    code = f"import runpy, sys; runpy.run_path({launcher.__file__!r}); print([m for m in sys.modules if 'spar' in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "[]"
