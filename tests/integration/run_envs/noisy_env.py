"""An environment where random weights already find signal, so that whole runs can be tested in seconds."""

import gymnasium

from sparring.envs import ChatEnv
from sparring.errors import TaskError
from sparring.types import Message


class Noisy(ChatEnv):
    """Two turns; the reward is the share of letters in what was said. None of the split `broken` can be played, or
    not the task of that id.
    """

    def __init__(self, *, train_size=6, answer="yes", broken=None, **kwargs):
        super().__init__(**kwargs)
        self.sizes, self.broken = {"train": train_size, "test": 4}, broken

    def task_ids(self, split="train"):
        return [f"{split}/{i}" for i in range(self.sizes[split])]

    async def _begin(self, task_id):
        if self.broken in (task_id, task_id.split("/")[0]):
            raise TaskError("the service is down")
        self.said = ""
        return [Message("user", f"Say something about {task_id}.")]

    async def _submit(self, answer):
        self.said += answer
        self.reward = sum(c.isalpha() for c in self.said) / max(1, len(self.said))
        return "Go on." if self.turns < 2 else None


gymnasium.register("test/Noisy-v0", entry_point=Noisy)
