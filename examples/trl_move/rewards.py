"""Reward functions as TRL's GRPOTrainer calls them; `train.yaml` and `trl_script.py` use the same ones."""

import re


def correct(completions, answer, **kwargs):
    """1 where the last number of the completion is the answer."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, answer, strict=True)]


async def brief(completions, **kwargs):
    """1 for an empty completion, 0 from 200 characters on."""
    return [max(0.0, 1 - len(completion[0]["content"]) / 200) for completion in completions]
