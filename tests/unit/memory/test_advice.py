"""Advice of `preflight`: what it gives fits when it is done, and nothing in it can be left out."""

import contextlib
import copy
import itertools
import json
import re
import runpy
from pathlib import Path

import pytest

from rlinf_vl.config import config_keys, parse_config
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.known import KNOWN, model_config
from rlinf_vl.tools.memory.advice import LORA, MEMORY_CHANGES, Advisor, advise
from rlinf_vl.tools.memory.ledger import Hardware, Ledger, ledger
from rlinf_vl.tools.memory.model import Model

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
PAGES = runpy.run_path(str(Path(__file__).parents[3] / "docs/generate_memory_page.py"))
#: Parameters by the published safetensors indices; those of Qwen3.5 with the block that predicts further tokens.
PUBLISHED = {
    "Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen3.5-0.8B": 873_438_784,
    "Qwen3.5-2B": 2_274_069_824,
    "Qwen3.5-4B": 4_659_865_088,
    "Qwen3.5-9B": 9_653_104_368,
    "Qwen3.5-27B": 27_781_427_952,
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> str:
    """The override that names a model of the 8B's width with two layers, which is traced in no time."""
    folder = tmp_path_factory.mktemp("shallow")
    shape = copy.deepcopy(KNOWN["Qwen/Qwen3-VL-8B-Instruct"])
    shape["text_config"] |= {"num_hidden_layers": 2}
    shape["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    (folder / "config.json").write_text(json.dumps(shape))
    return f"rollout.model.model_path={folder}"


def made(*overrides: str, on: Hardware) -> Ledger:
    """The ledger of a valid config with these overrides."""
    config = parse_config(FLAGSHIP, overrides)
    validate_config(config)
    return ledger(config, on, Model(config))


def gpus(count: int, gib: float) -> Hardware:
    return Hardware(count, int(gib * 2**30))


def overrides_in(line: str) -> list[str]:
    """The overrides that a line of advice names."""
    return [
        text
        for text in re.findall(r"[\w.]+=[^\s:;]+", line)
        if text.partition("=")[0] in config_keys()
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "on"),
    [
        ((), gpus(1, 36)),
        (("actor.enable_offload=true",), gpus(1, 36)),  # excludes cpu_offload
        ((), gpus(4, 36)),
        (("runner.max_tokens_per_mbs=262144",), gpus(1, 80)),
        (("rollout.gpu_memory_utilization=0.75",), gpus(1, 60)),
        (("rollout.gpu_memory_utilization=0.03",), gpus(1, 80)),
    ],
    ids=["one", "offload", "four", "budget", "share", "small-share"],
)
def test_advice_fits_when_it_is_done_and_none_of_it_can_be_left_out(shallow, overrides, on):
    before = made(shallow, *overrides, on=on)
    line, *_ = advise(before, Model(before.config))
    advised = overrides_in(line)
    assert line.startswith("set ") and advised, line
    after = made(shallow, *overrides, *advised, on=on)
    assert not after.problems
    peak, phase = max(gpu.peak for gpu in after.gpus)
    assert f"at most {peak / 2**30:.1f} of {on.usable / 2**30:.1f} GiB, in {phase}" in line
    free = on.usable - peak
    assert (f", with {free / 2**30:.1f} free where 3 are safe" in line) == (free < 3 * 2**30)
    for some in itertools.combinations(advised, len(advised) - 1):
        with contextlib.suppress(ConfigError):  # or it is no valid config without that
            assert made(shallow, *overrides, *some, on=on).problems, f"{some} is enough"


@pytest.mark.slow
def test_the_budget_that_is_advised_is_near_the_largest_that_fits(shallow):
    before = made(shallow, "runner.max_tokens_per_mbs=262144", on=gpus(1, 80))
    (line,) = advise(before, Model(before.config))
    (advised,) = overrides_in(line)
    budget = int(advised.removeprefix("runner.max_tokens_per_mbs="))
    assert made(shallow, f"runner.max_tokens_per_mbs={int(budget * 1.25)}", on=gpus(1, 80)).problems


@pytest.mark.slow
def test_where_no_setting_helps_smallest_hardware_and_adapters_are_named(shallow):
    on = gpus(1, 14)
    before = made(shallow, on=on)
    none, smallest, *adapters = advise(before, Model(before.config))
    assert none == "no setting makes it fit on 1 GPU of 14.0 GiB"
    assert smallest.startswith("smallest that fits: ") and "× 80 GB" in smallest
    advisor = Advisor(before.config, Model(before.config))
    for text in smallest.split("; or "):
        counts = [int(number) for number in re.findall(r"(\d+) (?:× |GB)", text)]
        *machines, count, card = counts
        assert not made(
            shallow, *overrides_in(text), on=Hardware.named(count, card, *machines)
        ).problems
        if count > 1:
            assert (
                advisor.smallest_change(Hardware.named(count // 2, card), cpu_offload=False) is None
            )
    for line in adapters:
        assert "actor.model.is_lora=true" in line
        assert not made(shallow, *overrides_in(line), on=on).problems


@pytest.mark.slow
def test_a_run_that_has_its_gpus_is_told_of_the_verb_that_knows_more(shallow):
    before = made(shallow, on=gpus(1, 14))
    (line,) = advise(before, Model(before.config), elsewhere=False)
    assert line.endswith("'rlinf-vl preflight' says the smallest hardware that fits")


@pytest.mark.slow
def test_no_change_raises_the_peak(shallow):
    """The search relies on it: where all changes together are too little, no part of them is tried."""
    wasteful = [
        "rollout.gpu_memory_utilization=0.9",
        "actor.fsdp_config.reshard_after_forward=false",
    ]
    config = parse_config(FLAGSHIP, [shallow, *wasteful])
    advisor = Advisor(config, Model(config))
    before = advisor.ledger_with([], gpus(4, 80))
    for change in MEMORY_CHANGES:
        assert (
            advisor.ledger_with([change], gpus(4, 80)).gpus[0].peak[0] <= before.gpus[0].peak[0]
        ), change


@pytest.mark.slow
def test_adapters_on_stacked_experts_are_traced(tmp_path):
    shape = copy.deepcopy(KNOWN["Qwen/Qwen3-VL-30B-A3B-Instruct"])
    shape["text_config"] |= {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = parse_config(
        FLAGSHIP, [f"rollout.model.model_path={tmp_path}", "rollout.model.model_type=auto"]
    )
    advisor = Advisor(config, Model(config))
    assert advisor.ledger_with(LORA, gpus(1, 80)).trace.peak > 0
    assert advisor.ledger_with(advisor.qlora, gpus(1, 80)).trace.peak > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(name):
    config = parse_config(
        FLAGSHIP, [f"rollout.model.model_path=Qwen/{name}", "rollout.model.model_type=auto"]
    )
    counted = Model(config).weights.total
    text = Model(config).shape.get_text_config()
    # A block of full attention, a projection of two hidden states, norms.
    if text.model_type.startswith("qwen3_5"):
        hidden, width = text.hidden_size, text.head_dim
        attention = hidden * width * (3 * text.num_attention_heads + 2 * text.num_key_value_heads)
        counted += (
            attention + 3 * hidden * text.intermediate_size + 2 * hidden**2 + 5 * hidden + 2 * width
        )
    assert counted == PUBLISHED[name]


def test_shapes_are_known_without_a_network_for_both_editions():
    assert {name.removeprefix("Qwen/") for name in KNOWN} == set(PUBLISHED)
    thinking, _ = model_config("Qwen/Qwen3-VL-8B-Thinking")
    assert thinking.text_config.hidden_size == 4096


@pytest.mark.slow
def test_the_table_of_the_page_counts_the_gpus_that_the_ledger_counts():
    """One row's adapters; the others are made alike by `python docs/generate_memory_page.py --sizes`."""
    table = PAGES["sizes_table"]()
    assert all(f"| {name} |" in table for name in PAGES["sizes"]())
    needed = PAGES["gpus_needed"]("Qwen3-VL-2B-Instruct", ("LoRA",), (24, 80))
    full = PAGES["sizes"]()["Qwen3-VL-2B-Instruct"]["LoRA"]
    assert needed["LoRA"] == [full[0], full[2]]
