"""The paths that the GPU's attention follows give what the blocks give, chunk by chunk.

The GPU's kernel itself is held to the blocks by `benchmarks.gpu.tree`, before it is timed.
"""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.backend.trainer.attention import TreeLayout, tree_attention


def rows(seed: int, sequences: int):
    """Sequences that branch off at random places of the one before, as packing lays them out."""
    rng = np.random.default_rng(seed)
    paths, chunks, total = [], [], 0
    for i in range(sequences):
        shared = int(rng.integers(0, len(paths[-1]) + 1)) if i else 0
        novel = int(rng.integers(0 if i else 1, 9))
        prefix = paths[-1][:shared] if shared else np.empty(0, np.int64)
        paths.append(np.concatenate([prefix, np.arange(total, total + novel)]))
        chunks.append(novel)
        total += novel
    return paths, chunks, total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_paths_and_blocks_attend_alike(seed, sequences):
    paths, chunks, total = rows(seed, sequences)
    layout = TreeLayout(paths, chunks)
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, total, 8) for heads in (4, 2, 2))
    expected, _ = tree_attention(torch.nn.Module(), q, k, v, None, tree=layout)
    along = layout.paths
    assert along is not None
    where = along.keys if along.keys is not None else torch.arange(total)
    outputs = []
    for i in range(len(along.ends_q) - 1):
        queries = q[:, :, along.ends_q[i] : along.ends_q[i + 1]]
        keys, values = (x[:, :, where[along.ends_k[i] : along.ends_k[i + 1]]] for x in (k, v))
        n_q, n_k = queries.shape[2], keys.shape[2]
        mask = torch.ones(n_q, n_k, dtype=torch.bool).tril(n_k - n_q)  # aligned to the end of both
        outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True))
        assert n_q <= along.longest_q
        assert n_k <= along.longest_k
    got = torch.cat(outputs, 2).transpose(1, 2)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)
