"""A new algorithm from existing parts: GRPO whose clip is wide where the advantage is positive, narrow where negative.

Only the surrogate is new; advantage, ratio, normalisation, corrections and KL are composed, and can be overridden:
    objective: {name: examples/algorithms/asymmetric_clip.py:asymmetric_clip, kwargs: {wide: 0.5, advantage: rloo}}
"""

import torch

from sparring.backend.objectives import LossInputs, Objective, Parts, compose


def asymmetric_clip(wide: float = 0.4, narrow: float = 0.1, **parts) -> Objective:
    def surrogate(x: LossInputs, log_ratio: torch.Tensor):
        ratio = log_ratio.exp()
        limit = torch.where(x.advantages > 0, 1 + wide, 1 - narrow)
        clipped = torch.where(x.advantages > 0, torch.min(ratio, limit), torch.max(ratio, limit))
        kept = clipped == ratio
        return -clipped * x.advantages, {"keep_fraction": (kept.sum(), torch.ones_like(ratio).sum())}

    return compose("asymmetric_clip", Parts("group_norm", surrogate, aggregation="token_mean"), parts)
