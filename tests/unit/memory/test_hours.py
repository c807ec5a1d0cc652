"""The range of `preflight --time`: published steps lie in it, and it moves as it should."""

from dataclasses import dataclass

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.tools.memory.gpu_kinds import GPU_KINDS
from rlinf_vl.tools.memory.hours import FAST, SLOW, Lengths, estimate_step, seconds_text, steps_of
from rlinf_vl.tools.memory.model import Model

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"


@dataclass(frozen=True)
class Published:
    """A step of another system: GPUs are H100; `tokens`: mean of a trajectory, its prompt included."""

    name: str
    model: str
    seconds: float
    tokens: float
    gpus: int = 8
    tp: int = 2
    prompts: int = 512
    group_size: int = 5
    minibatches: int = 4
    prompt: float = 375
    images: float = 200
    longest: int = 2048
    budget: int = 4096


def nemo(
    name: str,
    model: str,
    seconds: float,
    gpus: int,
    tp: int,
    prompts: int,
    tokens: float,
    longest: int,
) -> Published:
    return Published(
        name, model, seconds, tokens, gpus, tp, prompts, 32, max(1, prompts * 32 // 512), 150, 0, longest, 12288
    )  # fmt: skip


#: The addresses are in docs/cost.md. NeMo RL's are of text models, whose VL twin has the same language model.
PUBLISHED = (
    Published("EasyR1 v0.3.0, 3B", "Qwen2.5-VL-3B", 180, 675),
    Published("EasyR1 v0.3.2, 3B", "Qwen2.5-VL-3B", 120, 675),
    Published("EasyR1 v0.3.0, 7B", "Qwen2.5-VL-7B", 180, 675),
    Published("EasyR1 v0.3.2, 7B", "Qwen2.5-VL-7B", 145, 725),
    Published("EasyR1 v0.3.2, 7B, 16k", "Qwen2.5-VL-7B", 120, 750, budget=16384),
    Published("EasyR1 v0.3.0, 32B", "Qwen2.5-VL-32B", 860, 968, tp=8),
    Published("EasyR1 v0.3.2, 32B", "Qwen2.5-VL-32B", 530, 1027, tp=8),
    Published("verl, 9B", "Qwen3.5-9B", 290, 2074, tp=8, prompts=32, minibatches=1),
    nemo("NeMo RL 0.4, 30B-A3B", "Qwen3-VL-30B-A3B", 225, 32, 4, 64, 3154, 4096),
    nemo("NeMo RL 0.6, 30B-A3B", "Qwen3-VL-30B-A3B", 192, 32, 2, 64, 3203, 4096),
    nemo("NeMo RL 0.4, 32B", "Qwen3-VL-32B", 393, 32, 4, 64, 3206, 4096),
    nemo("NeMo RL 0.4, 235B-A22B", "Qwen3-VL-235B-A22B", 506, 128, 8, 16, 5671, 8192),
    nemo("NeMo RL 0.6, 235B-A22B", "Qwen3-VL-235B-A22B", 395, 128, 8, 16, 5698, 8192),
)
#: Their updates reach 6 and 2.5 % of the products, by what is published.
OUTSIDE = {"EasyR1 v0.3.0, 3B", "verl, 9B"}


def ends(case: Published) -> tuple[float, float]:
    """Return our two ends for a published setting: collocated, prompts not shared, everything recomputed."""
    seq_length = case.longest + 512
    name = case.model if case.model == "Qwen3.5-9B" else f"{case.model}-Instruct"
    overrides = [
        f"rollout.model.model_path=Qwen/{name}", "rollout.model.model_type=auto", f"cluster.num_nodes={case.gpus // 8}",
        f"data.rollout_batch_size={case.prompts}", f"algorithm.group_size={case.group_size}", "algorithm.kl_beta=0.01",
        f"algorithm.n_minibatches={case.minibatches}", "algorithm.recompute_logprobs='true'",
        f"rollout.tensor_parallel_size={case.tp}", "actor.enable_offload=true",
        "actor.fsdp_config.gradient_checkpointing=full", f"runner.seq_length={seq_length}",
        f"algorithm.sampling_params.max_new_tokens={case.longest}", f"runner.max_tokens_per_mbs={max(case.budget, seq_length)}",
        *(["actor.fsdp_config.expert_parallel_size=8"] if "-A" in name else []),
    ]  # fmt: skip
    config = parse_config(FLAGSHIP, overrides)
    model = Model(config)
    placement = placement_of(config, (8,) * (case.gpus // 8))
    response = case.tokens - case.prompt
    longest = max(case.longest, response)
    lengths = Lengths(case.prompt, case.images, response, longest, case.group_size)
    kv_token = model.family.decode_state(model.shape).token_bytes(model._meta_model.dtype)
    kv_tokens = case.tp * 30 * 2**30 // kv_token  # a cache of 30 GiB on each GPU
    fast, slow = (
        estimate_step(config, model, placement, GPU_KINDS["h100"], lengths, kv_tokens, shares).total
        for shares in (FAST, SLOW)
    )
    return fast, slow


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_a_published_step_lies_in_the_range(case):
    fast, slow = ends(case)
    assert (fast <= case.seconds <= slow) != (case.name in OUTSIDE), (fast, case.seconds, slow)


@pytest.mark.slow
def test_more_gpus_and_smaller_models_take_less():
    base = Published("", "Qwen2.5-VL-7B", 0, 675)
    # On 16 GPUs weights come from another machine, at the fast end more slowly than they are used.
    assert ends(Published("", "Qwen2.5-VL-7B", 0, 675, gpus=16))[1] < ends(base)[1]
    assert ends(Published("", "Qwen2.5-VL-3B", 0, 675)) < ends(base)
    assert ends(base) < ends(Published("", "Qwen2.5-VL-7B", 0, 1350))


@pytest.mark.slow
def test_the_verb_says_a_range_and_what_tells_more(capsys):
    assert main(["preflight", FLAGSHIP, "--time", "--price", "2", "runner.max_steps=100"]) == 0
    printed = capsys.readouterr().out
    assert "| step |" in printed and "- 100 steps: " in printed and " to " in printed
    assert "$" in printed and "runner.max_steps=3" in printed


@pytest.mark.slow
def test_what_does_not_fit_has_no_hours(capsys):
    assert main(["preflight", FLAGSHIP, "--time", "--gpu-memory", "16"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_steps_are_counted_from_rows_and_epochs(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1", "answer": "2"}\n' * 96)
    overrides = [
        f"data.train_data_paths=[{rows}]",
        "data.rollout_batch_size=32",
        "runner.max_epochs=2",
    ]
    assert steps_of(parse_config(FLAGSHIP, [*overrides, "runner.max_steps=-1"])) == 6
    assert steps_of(parse_config(FLAGSHIP, [*overrides, "runner.max_steps=4"])) == 4
    absent = [*overrides[1:], "data.train_data_paths=[hf://nobody/none]", "runner.max_steps=-1"]
    assert steps_of(parse_config(FLAGSHIP, absent)) is None


def test_two_digits_are_enough():
    assert seconds_text(123.4, 0.0987) == "120 to 0.099"
