"""Training an adapter alone: what is trained, sent, saved, and that engine, files and trainer mean one policy by it."""

import asyncio
import functools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.torch_engine import TorchEngine
from sparring.backend.lora import adapted_layers, check_lora
from sparring.backend.models import resolve_model
from sparring.backend.trainer.adapter import (
    StartingPolicy,
    adapter_dropout,
    adapter_tensors,
    merged,
    save_adapter,
)
from sparring.backend.trainer.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, save_model
from sparring.backend.trainer.packing import pack
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.probe import probe
from sparring.backend.trainer.trainer import AgentTrainer
from sparring.backend.trainer.warm_start import warm_start
from sparring.config import EngineConfig, LoraConfig, ObjectiveConfig
from sparring.errors import ConfigError, EngineError, TrainerError
from sparring.types import TokenSequence, Turn

LORA = LoraConfig(rank=4, alpha=8)


def stir(model, scale=0.05, seed=0):
    """Give B values, as training would: a new adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter_tensors(model).items():
            if name.endswith("lora_B.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


@pytest.fixture
def adapted(tiny_qwen3):
    torch.manual_seed(0)
    return stir(load_policy(tiny_qwen3, torch.float32, LORA)[0])


@pytest.fixture
def tokenizer(tiny_qwen3):
    return AutoTokenizer.from_pretrained(tiny_qwen3)


@pytest.fixture
def make_trainer(tiny_qwen3, tmp_path, kit):
    def make(run="run", source=None, objective=None, engine="torch", adapter=None, on_step=None, **trainer):
        config = kit.make_config(**({"lora": LORA} | trainer))
        config = config.model_copy(
            update={
                "objective": ObjectiveConfig(**(objective or {})),
                "engine": EngineConfig(dtype="float32", type=engine),
            }
        )
        parts = config, source or kit.source(), kit.KeepingPublisher()
        return AgentTrainer(tiny_qwen3, *parts, run_dir=tmp_path / run, adapter=adapter, on_step=on_step)

    return make


def logits_of(model, tokens=range(40)):
    """By transformers' own attention: an independent implementation."""
    model.eval().set_attn_implementation("sdpa")
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits


def test_a_new_adapter_is_the_plain_model(tiny_qwen3, kit):
    plain, _ = load_policy(tiny_qwen3, torch.float32)
    adapted, _ = load_policy(tiny_qwen3, torch.float32, LORA)
    row = pack(kit.make_samples())
    assert torch.equal(adapted(row=row).logprobs, plain(row=row).logprobs)


def test_only_the_adapter_is_trained_and_has_state_and_master_weights(make_trainer, tiny_qwen3):
    trainer = make_trainer(steps=1, dtype="bfloat16")
    layers = {n: m for n, m in AutoModelForCausalLM.from_pretrained(tiny_qwen3).named_modules() if hasattr(m, "weight")}
    linear = [m for n, m in layers.items() if n.endswith("_proj")]
    assert len(linear) == 4 * 7
    expected = sum(LORA.rank * sum(m.weight.shape) for m in linear)
    before = {name: p.detach().clone() for name, p in trainer._policy.named_parameters()}
    trainer.train()
    trained = [p for p in trainer._policy.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == expected
    assert {p.dtype for p in trained} == {torch.float32}
    assert {p.dtype for p in trainer._policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    state = trainer.optimizer.state_dict()["state"]
    moments = sum(value.numel() for of_one in state.values() for key, value in of_one.items() if key != "step")
    assert moments == 2 * expected
    changed = {name for name, p in trainer._policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)


def test_the_engine_gets_the_adapter_s_tensors_alone_under_their_versions(make_trainer):
    trainer = make_trainer()
    trainer.train()
    published = trainer._publisher.published
    assert list(published) == [0, 1, 2, 3]
    expected = adapter_tensors(trainer._policy)
    assert published[3].keys() == expected.keys()
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in expected
    torch.testing.assert_close(published[3], {n: p.detach() for n, p in expected.items()}, rtol=0, atol=0)
    assert not published[0]["model.layers.3.mlp.up_proj.lora_B.weight"].any()
    assert published[3]["model.layers.3.mlp.up_proj.lora_B.weight"].any()


def test_sglang_gets_the_merged_weights_under_the_plain_model_s_names(make_trainer, tiny_qwen3):
    trainer = make_trainer(engine="sglang", steps=2)
    trainer.train()
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_qwen3).named_parameters())
    sent = trainer._publisher.published[2]
    assert {n: t.shape for n, t in sent.items()} == {n: p.shape for n, p in plain.items()}
    assert torch.equal(sent["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    name, tensors = "model.layers.1.self_attn.v_proj", adapter_tensors(trainer._policy)
    product = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    torch.testing.assert_close(sent[f"{name}.weight"], plain[f"{name}.weight"] + 2.0 * product)


async def sample(engine, temperature=0.7):
    rng, sequences = np.random.default_rng(0), []
    for _ in range(4):
        prompt = rng.integers(0, 250, 20).tolist()
        got = await engine.generate(prompt, SamplingParams(max_new_tokens=24, temperature=temperature, seed=1))
        mask = np.arange(20 + len(got.token_ids)) >= 20
        turn = Turn(20, len(mask), temperature=temperature)
        versions = np.where(mask, engine.version, -1)
        sequences.append(TokenSequence(prompt + got.token_ids, mask, [0.0] * 20 + got.logprobs, versions, (turn,)))
    return sequences


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.01)])
async def test_objectives_7_the_engine_with_an_adapter_samples_from_the_trainer_s_policy(tiny_qwen3, kit, dtype, limit):
    policy = stir(load_policy(tiny_qwen3, getattr(torch, dtype), LORA)[0], scale=0.2)
    engine = TorchEngine(tiny_qwen3, slots=4, max_length=128, dtype=dtype, device="cpu", lora=LORA)
    await engine.start()
    try:
        before = await sample(engine)
        await engine.update_weights(1, adapter_tensors(policy).items())
        after = await sample(engine)
    finally:
        await engine.stop()
    config = kit.make_config(token_budget=300, dtype=dtype, max_logprob_drift=100.0)
    assert probe(policy, after, config).mean < limit
    assert probe(policy, before, config).mean > 0.05
    assert set(after[0].policy_versions[20:]) == {1}


async def test_an_update_too_small_for_a_merge_in_bfloat16_reaches_the_engine(tiny_qwen3, kit):
    """Merged, most of it would round away: the engine would go on sampling from the policy before it."""
    policy = stir(load_policy(tiny_qwen3, torch.bfloat16, LORA)[0], scale=2e-4)
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16).named_parameters())
    layer = "model.layers.0.mlp.up_proj.weight"
    rounded = dict(merged(policy, policy.named_parameters()))[layer].bfloat16()
    assert (rounded == plain[layer]).float().mean() > 0.5
    engine = TorchEngine(tiny_qwen3, slots=4, max_length=128, dtype="bfloat16", device="cpu", lora=LORA)
    await engine.start()
    try:
        greedy = SamplingParams(max_new_tokens=1, temperature=0, top_logprobs=8)
        before = await engine.generate(range(30), greedy)
        await engine.update_weights(1, adapter_tensors(policy).items())
        after = await engine.generate(range(30), greedy)
    finally:
        await engine.stop()
    assert before.top_logprobs != after.top_logprobs


def test_packed_is_unpacked_with_and_without_gradient_checkpointing(adapted, kit):
    samples = kit.make_samples(groups=3)
    adapted.train()

    def gradients(rows):
        adapted.zero_grad()
        for row in rows:
            (-(adapted(row=row).logprobs * row.advantages).sum() / 100).backward()
        return {name: p.grad.clone() for name, p in adapter_tensors(adapted).items()}

    alone = gradients([pack([s]) for s in samples])
    packed = gradients([pack(samples)])
    adapted.activation_checkpointing_enable()
    checkpointed = gradients([pack(samples)])
    largest = max(g.abs().max() for g in alone.values())
    for name, gradient in alone.items():
        assert (packed[name] - gradient).abs().max() <= 1e-6 * largest, name
        assert torch.equal(checkpointed[name], packed[name]), name


@pytest.mark.slow
def test_an_interrupted_and_resumed_run_ends_with_the_adapter_of_an_uninterrupted_one(make_trainer):
    whole = make_trainer("whole", steps=4)
    whole.train()

    def interrupt(record):
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    broken = make_trainer("broken", steps=4, on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    checkpoint = latest_checkpoint(broken._run_dir)
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 500_000
    assert not (checkpoint / "model.safetensors").exists()
    resumed = make_trainer("broken", steps=4)
    resumed.train(resume=True)
    assert resumed._source.asked == [2, 3]
    expected = dict(whole._policy.named_parameters())
    torch.testing.assert_close(dict(resumed._policy.named_parameters()), expected, rtol=0, atol=0)


def test_peft_loads_the_checkpoint_and_transformers_the_merged_model(make_trainer, tiny_qwen3, tmp_path):
    trainer = make_trainer(steps=2, learning_rate=1e-2)
    trainer.train()
    expected = logits_of(trainer._policy)
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    assert (logits_of(base) - expected).abs().max() > 0.1
    by_peft = PeftModel.from_pretrained(base, tmp_path / "run/checkpoint-2")
    torch.testing.assert_close(logits_of(by_peft), expected, rtol=0, atol=1e-5)

    trainer.write_model(tmp_path / "model", "{{ messages }}", adapter=tmp_path / "adapter")
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert by_transformers.dtype == torch.bfloat16
    torch.testing.assert_close(logits_of(by_transformers.float()), expected, rtol=0, atol=0.05)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == "{{ messages }}"
    description = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert description["target_modules"] == "all-linear"
    assert Path(description["base_model_name_or_path"]) == tiny_qwen3
    assert (description["r"], description["lora_alpha"]) == (4, 8)


def test_a_merged_folder_in_full_precision_is_the_policy(adapted, tokenizer, tmp_path):
    save_model(tmp_path / "merged", adapted, tokenizer, torch.float32)
    torch.testing.assert_close(
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits_of(adapted), rtol=0, atol=1e-5
    )


def test_an_adapter_s_folder_stands_for_its_merged_model(adapted, tmp_path, tokenizer):
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_adapter(folder, adapted, tokenizer, LORA)
    found = resolve_model(str(folder))
    assert found == folder / "merged"
    again = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
    torch.testing.assert_close(logits_of(again), logits_of(adapted), rtol=0, atol=0.05)
    made = (found / "config.json").stat().st_mtime_ns
    assert (resolve_model(str(folder)) / "config.json").stat().st_mtime_ns == made
    os.utime(folder / "adapter_config.json", (2**31, 2**31))
    assert (resolve_model(str(folder)) / "config.json").stat().st_mtime_ns > made


def test_an_adapter_whose_base_is_gone_is_refused(adapted, tmp_path, tokenizer):
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapted.name_or_path = str(tmp_path / "gone")
    save_adapter(folder, adapted, tokenizer, LORA)
    with pytest.raises(ConfigError, match=r"cannot merge the adapter in .*gone"):
        resolve_model(str(folder))


@pytest.mark.slow
def test_a_run_goes_on_from_the_adapter_of_its_warm_start(tiny_qwen3, make_trainer, kit, tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    sequences = [kit.make_sequence(rng, rng.integers(0, 250, 6)) for _ in range(4)]
    torch.manual_seed(0)
    policy, _ = load_policy(tiny_qwen3, torch.float32, LORA)
    losses = warm_start(policy, sequences, steps=30, lr=2e-2, batch_size=4, token_budget=60)
    assert losses[-1] < losses[0] - 1
    folder = tmp_path / "warm"
    folder.mkdir()
    save_adapter(folder, policy, tokenizer, LORA)
    trainer = make_trainer(adapter=folder, steps=1)
    trainer.train()
    start = {name: p.detach() for name, p in adapter_tensors(policy).items()}
    torch.testing.assert_close(trainer._publisher.published[0], start, rtol=0, atol=0)


def test_dropout_is_there_in_the_warm_start_alone(tiny_qwen3, kit):
    policy = stir(load_policy(tiny_qwen3, torch.float32, LoraConfig(rank=4, dropout=0.5))[0]).train()
    row = pack(kit.make_samples())
    score = functools.partial(policy, row=row)
    assert torch.equal(score().logprobs, score().logprobs)
    with adapter_dropout(policy, 0.5):
        assert not torch.equal(score().logprobs, score().logprobs)
    assert torch.equal(score().logprobs, score().logprobs)


def test_the_reference_of_a_kl_is_the_policy_at_the_start_without_a_second_model(adapted, kit):
    row = pack(kit.make_samples())
    reference = StartingPolicy(adapted)
    at_start = adapted(row=row).logprobs.detach()
    stir(adapted, seed=1)
    now = adapted(row=row).logprobs
    assert torch.equal(reference(row=row).logprobs, at_start)
    now.sum().backward()  # what was swapped is back: a graph from before is whole
    assert torch.equal(adapted(row=row).logprobs, now)
    assert not torch.equal(now, at_start)


@pytest.mark.slow
def test_a_kl_to_the_start_trains(make_trainer):
    trainer = make_trainer(objective={"name": "grpo", "kwargs": {"kl": "k3", "kl_coefficient": 0.1}}, steps=2)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], r"names 'q_prj'.*did you mean q_proj\? There are down_proj, gate_proj"),
        (["q_proj", "lm_head"], "names the head, 'lm_head'"),
        (["embed_tokens"], "names 'embed_tokens', which no linear layer"),
    ],
)
def test_layers_that_cannot_have_an_adapter_are_refused_before_weights_are_read(tiny_qwen3, targets, message):
    lora = LoraConfig(target_modules=targets)
    for attempt in (lambda: check_lora(tiny_qwen3, lora), lambda: load_policy(tiny_qwen3, torch.float32, lora)):
        with pytest.raises(ConfigError, match=message):
            attempt()


def test_the_layers_are_those_that_peft_would_choose(tiny_qwen3):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    for targets in ("all-linear", ["q_proj", "v_proj"], ["0.self_attn.o_proj"]):
        plain = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
        ours = set(adapted_layers(plain, LoraConfig(target_modules=targets)))
        peft = get_peft_model(plain, PeftConfig(target_modules=targets))
        theirs = {name.partition(".lora_A")[0] for name, _ in peft.named_parameters() if ".lora_A" in name}
        assert {f"base_model.model.{name}" for name in ours} == theirs


def test_a_checkpoint_of_another_adapter_is_refused_and_changes_nothing(tiny_qwen3, adapted, tmp_path, tokenizer):
    def optimizer_of(model):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    folder = save_checkpoint(tmp_path, 1, adapted, tokenizer, *optimizer_of(adapted), lora=LORA)
    for lora in (LoraConfig(rank=8), LoraConfig(rank=4, target_modules=["q_proj"]), None):
        other, _ = load_policy(tiny_qwen3, torch.float32, lora)
        before = [p.detach().clone() for p in other.parameters()]
        with pytest.raises(TrainerError, match="is of another model"):
            load_checkpoint(folder, other, *optimizer_of(other))
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), before, strict=True))


def test_a_warm_start_s_adapter_of_another_rank_is_refused(tiny_qwen3, adapted, tmp_path, tokenizer):
    save_adapter(tmp_path, adapted, tokenizer, LORA)
    with pytest.raises(ConfigError, match=r"another rank or other layers.*56 tensors differ"):
        load_policy(tiny_qwen3, torch.float32, LoraConfig(rank=8), tmp_path)
    with pytest.raises(ConfigError, match="holds no adapter"):
        load_policy(tiny_qwen3, torch.float32, LORA, tmp_path / "nothing")


async def test_an_engine_with_an_adapter_takes_its_peft_folder_and_refuses_whole_models(
    tiny_qwen3, adapted, tmp_path, tokenizer
):
    save_adapter(tmp_path, adapted, tokenizer, LORA)
    engine = TorchEngine(tiny_qwen3, slots=2, max_length=64, dtype="float32", device="cpu", lora=LORA)
    await engine.start()
    try:
        greedy = SamplingParams(max_new_tokens=6, temperature=0)
        await engine.update_weights(1, tmp_path)
        by_folder = await engine.generate(range(20), greedy)
        await engine.update_weights(2, adapter_tensors(adapted).items())
        by_tensors = await engine.generate(range(20), greedy)
        assert by_folder.logprobs == by_tensors.logprobs
        plain = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
        with pytest.raises(EngineError, match="names are those of its adapter"):
            await engine.update_weights(3, plain.named_parameters())
        with pytest.raises(EngineError, match="holds no adapter"):
            await engine.update_weights(3, tiny_qwen3)
        assert (await engine.health()).version == engine.version == 2
    finally:
        await asyncio.wait_for(engine.stop(), 30)


def test_an_adapter_on_a_model_of_the_hub_names_its_id(adapted, tokenizer, tmp_path):
    """Where the hub's cache lies on this machine is of no use on another one."""
    adapted.name_or_path = "/somewhere/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd"
    save_adapter(tmp_path, adapted, tokenizer, LORA)
    description = json.loads((tmp_path / "adapter_config.json").read_text())
    assert description["base_model_name_or_path"] == "Qwen/Qwen3-0.6B"
