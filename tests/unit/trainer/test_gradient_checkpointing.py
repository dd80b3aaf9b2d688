"""`trainer.gradient_checkpointing`: activations are computed again in backward, and every number stays."""

import pytest
import torch

from sparring.backend.trainer.trainer import AgentTrainer
from sparring.config import LoraConfig


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapter"])
def test_a_run_computes_layers_twice_and_ends_with_the_same_weights(tiny_qwen3, tmp_path, kit, lora):
    ends, calls = [], []
    for on in (False, True):
        config = kit.make_config(steps=1, gradient_checkpointing=on, lora=lora)
        trainer = AgentTrainer(tiny_qwen3, config, kit.source(), kit.KeepingPublisher(), run_dir=tmp_path / str(on))
        passes = []
        # of a module inside a layer: what is computed again calls the layer's forward, not its hooks
        trainer._policy.base_model.layers[0].self_attn.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        trainer.train()
        ends.append(trainer._policy.state_dict())
        calls.append(len(passes))
        assert trainer._record["packing"] > 1.2  # rows of a tree
    assert calls[1] == 2 * calls[0]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
