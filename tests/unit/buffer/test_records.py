"""The stored form of log-probabilities."""

import numpy as np
import pytest

from sparring.backend.buffer.records import decode_logprobs, encode_logprobs


@pytest.mark.parametrize("lengths", [[], [0], [3], [2, 0, 5]])
def test_log_probabilities_round_trip_exactly_with_their_gaps(lengths):
    rng = np.random.default_rng(0)
    before = [np.where(rng.random(n) < 0.5, np.nan, -rng.exponential(size=n)).astype(np.float32) for n in lengths]
    after = decode_logprobs(encode_logprobs(before))
    assert [array.dtype for array in after] == [np.float32] * len(lengths)
    assert len(after) == len(before)
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_log_probabilities_that_are_damaged_anywhere_are_refused():
    data = encode_logprobs([np.linspace(-1, 0, 5, dtype=np.float32)])
    for i in range(len(data)):
        for damaged in (data[:i], data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :]):
            with pytest.raises(ValueError, match="damaged"):
                decode_logprobs(damaged)
