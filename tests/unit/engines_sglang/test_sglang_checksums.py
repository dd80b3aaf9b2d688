"""Checksums that two sides can compare though one of them stacks and pads what the other has apart."""

import runpy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.engines.sglang import checksum
from sparring.backend.engines.sglang.checksum import parameter_checksums
from sparring.backend.engines.sglang.verify import compare

KINDS = [torch.bfloat16, torch.float32, torch.float16]
shapes = st.tuples(st.integers(1, 7), st.integers(1, 9))


def of(tensor):
    ((value, _),) = parameter_checksums([("w", tensor)]).values()
    return value


def random(shape, kind, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)


@given(shapes, st.integers(1, 5), st.sampled_from(KINDS))
def test_stacked_rows_sum_up_and_rows_of_zeros_add_nothing(shape, more_rows, kind):
    first, second = random(shape, kind), random((more_rows, shape[1]), kind, seed=1)
    stacked = torch.cat([first, torch.zeros_like(second), second])
    assert (of(stacked) - of(first) - of(second)) % 2**64 == 0


@given(shapes, st.sampled_from(KINDS), st.data())
def test_any_single_change_is_seen(shape, kind, data):
    tensor = random(shape, kind)
    changed = tensor.clone()
    row, column = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    bits = changed.view(torch.int16 if kind.itemsize == 2 else torch.int32)
    bits[row, column] ^= 1 << data.draw(st.integers(0, 14))
    assert of(changed) != of(tensor)


@given(shapes.filter(lambda shape: shape[1] > 1), st.sampled_from(KINDS))
def test_an_exchange_of_two_columns_is_seen(shape, kind):
    tensor = random(shape, kind)
    assert of(tensor.roll(1, dims=1)) != of(tensor)


@given(shapes, st.integers(1, 7), st.sampled_from(KINDS))
def test_it_does_not_depend_on_where_in_memory_a_tensor_lies(shape, offset, kind):
    tensor = random(shape, kind)
    buffer = torch.zeros(tensor.numel() + offset, dtype=kind)
    part = buffer[offset:].view(shape)
    part.copy_(tensor)
    assert of(part) == of(tensor) == of(tensor.t().contiguous().t())


def test_vectors_and_chunks_count_as_all_else(monkeypatch):
    vector, matrix = random((1000,), torch.bfloat16), random((100, 24), torch.float32)
    whole = of(matrix)
    monkeypatch.setattr(checksum, "_CHUNK_BYTES", 1000)
    assert of(matrix) == whole
    assert (of(vector) - of(vector[:300]) - of(vector[300:])) % 2**64 == 0


def test_the_file_runs_by_itself_inside_the_server():
    alone = runpy.run_path(checksum.__file__)
    tensor = random((5, 8), torch.bfloat16)
    assert alone["parameter_checksums"]([("w", tensor)]) == {"w": (of(tensor), "bfloat16")}
    assert alone["ACTION"] == checksum.ACTION


@pytest.fixture
def model():
    parts = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 8}
    return {f"model.layers.0.self_attn.{n}.weight": random((r, 8), torch.bfloat16, i) for i, (n, r) in
            enumerate(parts.items())}  # fmt: skip


def served(model):
    held = dict(model)
    parts = [held.pop(f"model.layers.0.self_attn.{n}_proj.weight") for n in "qkv"]
    return held | {"model.layers.0.self_attn.qkv_proj.weight": torch.cat(parts), "rotary.cache": torch.ones(3)}


def test_equal_weights_compare_as_equal_though_the_server_stacks_them(model):
    found = compare(parameter_checksums(model.items()), parameter_checksums(served(model).items()))
    assert found.wrong == found.unknown == ()


def test_a_parameter_that_differs_is_named_with_the_server_s(model):
    held = served(model)
    held["model.layers.0.self_attn.qkv_proj.weight"][9, 3] += 1
    found = compare(parameter_checksums(model.items()), parameter_checksums(held.items()))
    assert found.wrong == (
        "model.layers.0.self_attn.qkv_proj.weight (model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight)",
    )


def test_another_type_or_name_is_not_called_a_difference(model):
    held = served(model)
    held["model.layers.0.self_attn.o_proj.weight"] = held["model.layers.0.self_attn.o_proj.weight"].float()
    held["else"] = held.pop("model.layers.0.self_attn.qkv_proj.weight")
    found = compare(parameter_checksums(model.items()), parameter_checksums(held.items()))
    assert found.wrong == ()
    assert set(found.unknown) == set(model)


@pytest.mark.parametrize("chunk_bytes", [8, 4096, 64 * 2**20])
def test_what_a_tensor_is_hashed_together_with_changes_nothing(chunk_bytes, monkeypatch):
    monkeypatch.setattr(checksum, "_CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    shapes = [(64,), (7, 32), (64, 32), (3,), (500, 32), (5, 48), (1, 32), (64,)]
    tensors = {f"t{i}": torch.randn(shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)}
    tensors["in float32"] = torch.randn(9)
    alone = {name: parameter_checksums([(name, tensor)])[name] for name, tensor in tensors.items()}
    together = parameter_checksums(tensors.items())
    assert together == alone
    assert list(together) == list(tensors)
