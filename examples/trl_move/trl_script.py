"""Before: the TRL script. `train.yaml` says the same to sparring."""

import sys
from pathlib import Path

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
from rewards import brief, correct

dataset = load_dataset("json", data_files=str(Path(__file__).parent / "sums.jsonl"), split="train")
trainer = GRPOTrainer(
    model=sys.argv[1],
    reward_funcs=[correct, brief],
    train_dataset=dataset,
    args=GRPOConfig(reward_weights=[1.0, 0.2], num_generations=8, max_steps=10, learning_rate=1e-5, report_to="none"),
)
trainer.train()
