"""From a batch of groups to new weights: packing, tree attention, the loss, one optimizer step, checkpoints.

Nothing is imported here: `sparring.backend.trainer.trainer` brings torch, transformers and TRL with it.
"""
