"""Parts of a model: how they are read and filled, how rows are shared out, and what is refused. One rank, in this
process; several are in tests/integration/test_trainer_ranks.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sparring.backend.objectives.base import CriticSpec
from sparring.backend.trainer.checkpoint import save_model
from sparring.backend.trainer.critic import make_critic
from sparring.backend.trainer.interrupt import InterruptGuard
from sparring.backend.trainer.packing import pack
from sparring.backend.trainer.policy import load_policy
from sparring.backend.trainer.ranks import Ranks, sharding_mesh
from sparring.backend.trainer.sharding import part_of, shard, whole_parameters, whole_state
from sparring.config import TrainerConfig
from sparring.errors import ConfigError, TrainerError


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.fixture
def parts(tiny_qwen3, mesh):
    model, tokenizer = load_policy(tiny_qwen3, torch.bfloat16)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    shard(model, mesh, torch.bfloat16)
    return SimpleNamespace(model=model, tokenizer=tokenizer, before=before)


def test_parts_read_whole_are_what_they_were(parts):
    assert all(isinstance(p, DTensor) for p in parts.model.parameters())
    state = dict(whole_state(parts.model))
    torch.testing.assert_close(state, parts.before, rtol=0, atol=0)
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()


def test_a_pass_without_backward_leaves_the_masters_to_be_read(parts, kit):
    """It leaves the embedding whole, in bfloat16, in its parameter's place."""
    with torch.no_grad():
        parts.model(row=pack(kit.make_samples()))
    assert any(not isinstance(p, DTensor) for p in parts.model.parameters())
    for name, tensor in whole_parameters(parts.model):
        torch.testing.assert_close(tensor, parts.before[name], rtol=0, atol=0)
        assert not tensor.requires_grad


def test_parts_are_written_as_the_whole_model_is(parts, tiny_qwen3, tmp_path):
    model, tokenizer = load_policy(tiny_qwen3, torch.bfloat16)
    save_model(tmp_path / "whole", model, tokenizer)
    save_model(tmp_path / "parts", parts.model, parts.tokenizer)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_part_is_cut_as_its_parameter_is(parts):
    parameter = parts.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    values = torch.randn(parameter.shape)
    part = part_of(values, parameter)
    assert part.placements == parameter.placements
    torch.testing.assert_close(part.full_tensor(), values, rtol=0, atol=0)
    torch.testing.assert_close(part_of(values, torch.empty(1)), values, rtol=0, atol=0)


def ranks(index, count, mesh=None):
    return Ranks(
        SimpleNamespace(
            num_processes=count, process_index=index, is_main_process=index == 0, distributed_type="MULTI_CPU"
        ),
        mesh,
    )


def row(length):
    return [SimpleNamespace(context=np.zeros(length, np.int64))]


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12), count=st.integers(1, 5), sharded=st.booleans())
def test_every_row_is_some_ranks_and_ranks_that_hold_parts_make_equally_many_passes(lengths, count, sharded):
    rows = [row(length) for length in lengths]
    shares = [ranks(i, count, object() if sharded else None).share(rows) for i in range(count)]
    assert sorted(id(r) for mine, _ in shares for r in mine) == sorted(id(r) for r in rows)
    passes = {len(mine) + len(spare) for mine, spare in shares}
    assert min(passes) >= 1
    assert len(passes) == 1 or not sharded
    assert all(len(r[0].context) == min(lengths) for _, spare in shares for r in spare)
    assert max(passes) == -(-len(rows) // count)


def test_one_process_has_nothing_to_shard():
    assert sharding_mesh("fsdp2", torch.device("cpu")) is None


def test_accelerates_own_sharding_is_refused_by_the_key_that_does_it_here():
    from accelerate.utils import DistributedType

    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ConfigError, match=r"unset ACCELERATE_USE_FSDP.*trainer.sharding=fsdp2"):
        Ranks(accelerator, None)


@pytest.mark.parametrize("unfit", [{"lora": {}}, {"optimizer": "adamw_8bit"}, {"compile": True}], ids=str)
def test_what_cannot_be_sharded_is_refused_by_its_key(unfit):
    (key,) = unfit
    with pytest.raises(ValueError, match=f"leave out trainer.{key}"):
        TrainerConfig(sharding="fsdp2", **unfit)


def test_a_critic_that_is_a_second_model_is_refused_where_the_policy_is_in_parts(tiny_qwen3):
    spec = CriticSpec("token", 1.0, 0.95, own_model=True, learning_rate=1e-5)
    with pytest.raises(ConfigError, match="shards no second model"):
        make_critic(spec, None, tiny_qwen3, torch.float32, torch.device("cpu"), mesh=object())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), True),
        (torch.distributed.DistNetworkError("the server left"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
    ],
    ids=["gloo", "store", "another"],
)
def test_a_rank_that_is_gone_is_told_from_other_errors(error, told):
    expected = (TrainerError, "another rank of this run is gone") if told else (RuntimeError, "is invalid")
    with pytest.raises(expected[0], match=expected[1]), ranks(0, 2).together():
        raise error
    with pytest.raises(type(error)), ranks(0, 1).together():
        raise error


def test_a_guard_obeys_what_the_ranks_agreed_upon_not_its_own_signal():
    guard = InterruptGuard()
    guard.hold()
    with pytest.raises(KeyboardInterrupt):
        guard.release(interrupted=True)
    guard._pending = True  # it came after the ranks had agreed to go on
    guard.release(interrupted=False)
    assert guard.pending
