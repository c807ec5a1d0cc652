"""Keys of `rollout`: the engine and the environment."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from rlinf_vl.config.hubs import verifiers_name
from rlinf_vl.config.schema.limits import (
    AT_LEAST_1,
    DTYPES,
    FAMILIES,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE_OR_AUTO,
    OrCode,
    key,
)
from rlinf_vl.weights import STRATEGIES

#: The call of an agent's function.
AGENT_CALL = "solve(task, client)"
_WEIGHT_SYNC_SUMMARIES = {name: listing.summary for name, listing in STRATEGIES.items()}


@dataclass
class RolloutModelConfig:
    model_path: str = MISSING
    """Checkpoint folder (HF format) or hub name, for policy and reference; or an embedded task
    (`toy`), for its tiny model."""
    model_type: str = key("auto", OrCode(("auto", *FAMILIES), "model family", "Family"))
    """Model family; auto: the one that the checkpoint's config.json names. Or a `Family` of yours,
    path/to/file.py:FAMILY."""
    precision: str = key("bf16", DTYPES)
    """The engine's dtype: fp32, bf16 or fp16. Weights are cast to it once, before they travel."""
    trust_remote_code: bool = False
    """Allow the checkpoint's own Python code to run."""


@dataclass
class SglangConfig:
    server_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of SGLang's server, by their own names, over what is chosen for it: such as
    attention_backend, log_level (error unless set), and two that divide an engine's GPUs. ep_size:
    groups among which a mixture's experts are divided, whole; 1: each GPU has a slice of every
    expert. attn_dp_size: groups that attend to requests of their own, so that no key is kept twice
    where tensor_parallel_size exceeds the model's key heads; 1: all GPUs attend to every request."""

    @property
    def ep_size(self) -> int:
        """Groups of an engine's GPUs among which experts are divided, whole."""
        return self._groups("ep_size")

    @property
    def attn_dp_size(self) -> int:
        """Groups of an engine's GPUs that attend to requests of their own."""
        return self._groups("attn_dp_size")

    def _groups(self, name: str) -> int:
        groups = self.server_args.get(name)
        # `check_engine_groups` refuses anything else.
        return groups if type(groups) is int and groups > 0 else 1


@dataclass
class ThinkingConfig:
    mode: str = key("auto", ("auto", "on", "off"))
    """Whether the model thinks before it answers, told to its chat template as enable_thinking;
    auto says nothing. on and off are refused where the template doesn't know that."""
    budget: int | None = key(None, AT_LEAST_1)
    """Most tokens of a thought, its `<think>` included. One that has used them up is closed with
    `</think>`, which is not sampled and carries no loss, and the answer goes on within
    max_new_tokens. null: no limit but max_new_tokens."""
    history: str = key("as_template", ("as_template", "keep"))
    """Thoughts of earlier answers in the next prompt: as the checkpoint's chat template has them,
    or all of them, as sampled. Where the template drops them, as_template makes each turn after a
    question a sequence of its own, and keep one sequence of all turns."""


@dataclass
class AgentConfig:
    function: str | None = key(None, OrCode((), "agent", AGENT_CALL))
    """An agent that drives itself: module:function or path/to/file.py:function, with `async def` or
    without. It gets the task and an OpenAI client of the worker's endpoint, and returns a reward, an
    AgentResult, or null for the reward functions. Replaces rollout.env_class."""
    command: list[str] = field(default_factory=list)
    """The same as a command and its arguments, a process for each trajectory: OPENAI_BASE_URL,
    OPENAI_API_KEY and RLINF_VL_TASK in its environment, the result in its last line of output. An
    argument that names a file is made absolute, as each process has a folder of its own."""
    app: str | None = None
    """The same as a task app's address, such as http://localhost:8000: it gets each trajectory's task
    and the endpoint in one request, and replies with the result (docs/remote.md, protocol 2). The
    environment variable TASK_APP_TOKEN holds its bearer token, if it wants one."""
    max_calls: int = key(1000, AT_LEAST_1)
    """Most calls of a trajectory; a further one is refused. rollout.max_turns counts, too."""
    max_concurrent: int | None = key(64, AT_LEAST_1)
    """Most agents under way in one worker; null for all."""
    timeout: float = key(600.0, POSITIVE)
    """Seconds that an agent has, from its start to its result."""
    memory_gb: float = key(4.0, POSITIVE)
    """Resident memory of a command with all processes that it starts, in GiB."""
    allow_sampling: bool = False
    """Let a call choose temperature and top_p. The logprobs are those of what was sampled from."""

    @property
    def is_set(self) -> bool:
        """Whether the config names an agent."""
        return self.function is not None or bool(self.command) or self.app is not None


@dataclass
class RolloutConfig:
    rollout_backend: str = key("torch", ("torch", "sglang"))
    """Engine: torch (embedded, everywhere) or sglang (bash requirements/install.sh --sglang)."""
    tensor_parallel_size: int = key(1, AT_LEAST_1)
    """Slots that one SGLang engine spans; the torch engine takes one."""
    deterministic: bool = False
    """SGLang's batch-invariant kernels (CUDA only): a sample depends on its prompt and seed alone,
    at about a third of the speed."""
    weight_sync: str = key("auto", ("auto", *STRATEGIES), _WEIGHT_SYNC_SUMMARIES)
    """How weights reach the engines. auto: the first of the others that suits the placement."""
    kv_after_update: str = key("recompute", ("recompute", "keep"))
    """Treatment of the keys and values of running responses when weights arrive. recompute:
    the new weights compute them again, so that every logprob is what the trainer computes for the
    weights that sampled the token. keep: they stay; nothing is computed twice, and no single
    version of the weights gives these logprobs (SGLang then decodes without its overlap schedule).
    The same goes for what an episode's later turns continue. Other episodes never use what former
    weights have computed."""
    sglang: SglangConfig = field(default_factory=SglangConfig)
    return_logprobs: bool = True
    """Keep the engine's logprobs on every trajectory (needed by TIS and by the rollout/train
    metrics)."""
    gpu_memory_utilization: float | str = key(0.6, SHARE_OR_AUTO)
    """Share of a GPU's memory for the engine's weights and KV cache; on CPU, of free memory, and
    what is unused is not reserved. `auto`: what the memory ledger leaves beside the trainer
    (`rlinf-vl preflight`); 0.6 on CPU."""
    max_running_requests: int = key(256, AT_LEAST_1)
    """Responses decoded at once by one worker; further ones wait."""
    model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    thinking: ThinkingConfig = field(default_factory=ThinkingConfig)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the checkpoint's chat template, such as {reasoning_effort: low}. Refused
    where the template doesn't name them. thinking.mode is its enable_thinking."""
    env_class: str = key("single_turn", OrCode())
    """Environment: a registered name (single_turn), module:Class, or path/to/file.py:Class, whose
    text travels to the workers. A row's column env_class names that row's own. From hubs:
    verifiers:NAME, openenv:URL and openenv:module:Class (docs/hubs.md)."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keywords for the environment's constructor; for verifiers:NAME, its arguments. A value
    `@path` is replaced by the text of that file (relative to the working folder, or else to the
    examples). A row's column env_kwargs has further ones, over these."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    max_turns: int | None = key(None, AT_LEAST_1)
    """Most answers of an episode, which then ends; null leaves it to the environment and to
    runner.seq_length."""
    max_concurrent_rollouts: int | None = key(None, AT_LEAST_1)
    """Most episodes under way in one worker, so that not all environments are open at once; null
    for all."""
    env_processes: int = key(0, NOT_NEGATIVE)
    """Processes beside each worker in which its environments run, so that a crash of one ends its
    process and not the engine; 0: in the worker. single_turn, and all with cluster.backend=local,
    stay in it. An agent's function runs in as many, one at least; each runs many agents at a
    time."""
    turn_timeout: float = key(60.0, POSITIVE)
    """Seconds that an environment has for one call (start, step, close). One that takes longer is
    an error of its trajectory."""
    episode_timeout: float | None = key(None, POSITIVE)
    """Seconds that an episode may take, waiting for the engine included, the start of its
    environment's process not; one that takes longer is an error. null: no limit. SGLang gives up
    one request after as many, but not before 600."""
    faults: str = key("mask", ("mask", "penalize"))
    """Treatment of a trajectory whose environment failed or ran out of time. mask: it is left out,
    also of its group's baseline. Longer episodes fail more often, so this favours short ones.
    penalize: it gets reward.reward_min_val and is trained on with the turns that it has, so the
    policy learns to avoid what fails, its own doing or not. Faults of the engine, of rows and of
    reward functions are always masked. A validation counts any of them as an error and a wrong
    answer."""

    @property
    def verifiers_name(self) -> str | None:
        """The environment of the package verifiers that env_class names; None for another."""
        return verifiers_name(self.env_class)

    @property
    def has_agents(self) -> bool:
        """Whether agents drive the episodes: the config's own, or those of verifiers."""
        return self.agent.is_set or self.verifiers_name is not None
