"""A whole run without a model: the real recorder, buffer and worker over a scripted engine."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from sparring.backend.buffer import BufferView, TrajectoryBuffer
from sparring.backend.engines.base import SamplingParams
from sparring.backend.engines.scripted import ScriptedEngine
from sparring.backend.gateway import ChatFormat, Recorder
from sparring.backend.gateway.formats import get_format
from sparring.backend.gateway.template import ChatTemplate
from sparring.backend.rollout import Batch, RolloutWorker, TaskSampler
from sparring.backend.rollout.sampler import Sampler
from sparring.backend.rollout.stats import RolloutStats
from sparring.backend.weights import WeightPublisher
from sparring.config import RolloutConfig
from sparring.errors import BudgetExhausted
from sparring.types import EpisodeResult, EpisodeSpec, Message, StopReason

END = 1


@pytest.fixture(scope="session")
def word_chat() -> ChatFormat:
    """A vocabulary of four words, and a template that ends every message with <end>."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<end>": END, "yes": 2, "no": 3}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}<end>{% endfor %}", {})
    return ChatFormat(tokenizer, template, get_format("hermes"))


def outcome(spec: EpisodeSpec) -> EpisodeResult:
    """Members of a group differ in reward, so every group carries signal."""
    return EpisodeResult(StopReason.FINISHED, reward=float(spec.episode_id.split(".")[-2]), reward_parts={"exact": 1.0})


@dataclass
class Rig:
    """One process's worth of a run. `play` decides what an episode gives, after its turns of chat."""

    path: Path
    chat: ChatFormat
    play: Callable[[EpisodeSpec], EpisodeResult] = outcome
    config: dict = field(default_factory=dict)
    tasks: int = 10
    sampler_class: Callable[[Sampler], Sampler] | None = None  # what is put over the sampler of tasks
    gates: dict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    on_wait: Callable[[RolloutStats], None] | None = None
    says: Sequence[int] = (2, END)
    turns: int = 1
    max_length: int = 64
    held: set[str] = field(default_factory=set)  # episodes that wait at their gate, after their turn
    started: list[tuple[int, EpisodeSpec]] = field(default_factory=list)  # with the version then live

    def __post_init__(self) -> None:
        self.rollout = RolloutConfig(**{"group_size": 2, "groups_per_step": 2, "staleness": 1, **self.config})
        self.buffer = TrajectoryBuffer.open(self.path)
        self.engine = ScriptedEngine(lambda prompt: self.says)
        self.recorder = Recorder(self.engine, self.chat, SamplingParams(max_new_tokens=4), max_length=self.max_length)
        tasks = [f"train-{i}" for i in range(self.tasks)]
        self.sampler = TaskSampler("x/X-v0", tasks, group_size=self.rollout.group_size, seed=0)
        if self.sampler_class is not None:
            self.sampler = self.sampler_class(self.sampler)
        self.worker = RolloutWorker(
            engine=self.engine,
            recorder=self.recorder,
            run_episode=self.run_episode,
            sampler=self.sampler,
            config=self.rollout,
            buffer=self.buffer,
            on_wait=self.on_wait,
        )
        self.publisher = WeightPublisher(self.worker, self.engine, timeout_s=10)

    async def run_episode(self, spec: EpisodeSpec, session) -> EpisodeResult:
        self.started.append((self.engine.version, spec))
        messages = [Message("user", "yes or no")]
        for _ in range(self.turns):
            try:
                reply = await session.chat(messages)
            except BudgetExhausted:
                break
            messages += [reply.message, Message("user", "no")]
        if spec.episode_id in self.held:
            await self.gates[spec.episode_id].wait()
        return self.play(spec)

    def release(self, episode_id: str) -> None:
        self.worker.run(self._open_gate(episode_id), 5)

    async def _open_gate(self, episode_id: str) -> None:
        self.gates[episode_id].set()

    def publish(self, version: int) -> None:
        self.publisher.publish(version, [])
        self.worker.update_model_version(version)

    def train(self, first: int, last: int) -> list[Batch]:
        """Steps `first` to `last`, as a trainer takes them; weights of step `first - 1` are live before."""
        batches = []
        for step in range(first, last + 1):
            batches.append(self.worker.next_batch(step - 1, timeout_s=10))
            self.publish(step)
        return batches

    def fates(self) -> dict[str, tuple[str, int | None]]:
        with BufferView(self.path) as view:
            return {row.episode_id: (row.state, row.consumed_step) for row in view.ledger()}

    def close_buffer_instead(self, group_id: str) -> None:
        """In place of a buffer's method: the process dies just before."""
        self.buffer.close()
        self.buffer.drop_group(group_id, "never written")

    def close(self) -> None:
        self.worker.stop()
        self.buffer.close()


@pytest.fixture
def make_rig(tmp_path, word_chat):
    rigs: list[Rig] = []

    def make(**values) -> Rig:
        rigs.append(Rig(tmp_path / "buffer.db", word_chat, **values))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
