"""A model copied piece by piece: all of it, once, within a bound of memory."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.backend.engines.remote.layout import WeightLayout
from sparring.backend.engines.sglang.buckets import BucketStager
from sparring.backend.engines.sglang.checksum import parameter_checksums
from sparring.errors import EngineError

SHAPES = {"a": (4, 8), "b": (16, 8), "c": (8,), "d": (3, 5), "e": (16, 8)}


def layout(tied=False):
    return WeightLayout(Path("model"), "Qwen3ForCausalLM", "bfloat16", tied, SHAPES)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def pieces(stager, source):
    """The buckets of an update, each copied when the one after the next would overwrite it."""
    bucket = stager.first(source)
    yield bucket
    while not bucket.last:
        bucket = stager.following()
        yield bucket


@given(st.integers(1, 2000), st.sampled_from([1, 8, 256]), st.permutations(list(SHAPES)))
def test_every_tensor_comes_once_cast_whatever_the_limit_and_the_order(limit, alignment, order):
    given_weights = weights()
    stager = BucketStager(layout(), limit, alignment=alignment)
    found: dict[str, torch.Tensor] = {}
    for bucket in pieces(stager, ((name, given_weights[name]) for name in order)):
        assert not found.keys() & dict(bucket.views).keys()
        found |= {name: view.clone() for name, view in bucket.views}
    assert list(found) == list(order)
    for name, tensor in found.items():
        assert torch.equal(tensor, given_weights[name].bfloat16())


@given(st.integers(1, 2000))
def test_its_memory_is_the_limit_or_two_of_the_largest_tensor(limit):
    stager = BucketStager(layout(), limit, alignment=1)
    for _ in range(2):
        for _bucket in pieces(stager, weights().items()):
            pass
    taken = sum(buffer.numel() for buffer in stager._buffers if buffer is not None)
    whole = sum(torch.Size(shape).numel() * 2 for shape in SHAPES.values())
    assert taken <= (whole if whole <= limit else max(limit, 2 * 16 * 8 * 2))


def test_a_bucket_stays_as_it_was_while_the_next_is_staged():
    stager = BucketStager(layout(), 600, alignment=1)
    buckets = pieces(stager, weights().items())
    first = next(buckets)
    before = first.buffer.clone()
    second = next(buckets)
    assert torch.equal(first.buffer, before)
    assert second.buffer.data_ptr() != first.buffer.data_ptr()


def test_a_small_model_is_one_bucket_in_the_same_memory_each_time():
    stager = BucketStager(layout(), 10_000, alignment=256)
    (first,) = pieces(stager, weights().items())
    (second,) = pieces(stager, weights(1).items())
    assert first.last
    assert second.buffer.data_ptr() == first.buffer.data_ptr()


def test_tensors_without_room_between_them_are_the_flattened_bucket_that_the_server_expects():
    (bucket,) = pieces(BucketStager(layout(), 10_000, alignment=1), weights().items())
    flat = torch.cat([tensor.bfloat16().flatten().view(torch.uint8) for tensor in weights().values()])
    assert torch.equal(bucket.buffer, flat)


def test_checksums_are_those_of_what_was_staged():
    stager = BucketStager(layout(), 600, alignment=1)
    bucket = stager.first(weights().items(), checksums=True)
    while not bucket.last:
        bucket = stager.following()
    cast = {name: tensor.bfloat16() for name, tensor in weights().items()}
    assert stager.checksums == parameter_checksums(cast.items())


@pytest.mark.parametrize("limit", [10_000, 600])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("d"), r"missing \['d'\]"),
        (lambda w: w.update(stranger=torch.zeros(2)), r"unknown \['stranger'\]"),
        (lambda w: w.update(b=torch.zeros(2, 8)), r"b has shape \[2, 8\], expected \[16, 8\]"),
        (lambda w: w.clear(), "no tensor at all|missing"),
    ],
    ids=["missing", "unknown", "shape", "empty"],
)
def test_weights_that_do_not_fit_are_said(limit, change, said):
    changed = weights()
    change(changed)
    with pytest.raises(EngineError, match=said):
        list(pieces(BucketStager(layout(), limit, alignment=1), changed.items()))


def test_a_tensor_that_comes_twice_is_said():
    with pytest.raises(EngineError, match="hold a twice"):
        list(pieces(BucketStager(layout(), 10_000, alignment=1), [*weights().items(), ("a", torch.zeros(4, 8))]))


def test_a_tied_head_is_passed_over():
    head = ("lm_head.weight", torch.zeros(16, 8))
    (bucket,) = pieces(BucketStager(layout(tied=True), 10_000, alignment=1), [head, *weights().items(), head])
    assert dict(bucket.views).keys() == SHAPES.keys()
