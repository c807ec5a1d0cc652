"""The search for layouts: what it finds fits, what it prints can be pasted, and it is ranked."""

import shlex

import pytest
from tiny import tiny_config

from rlinf_vl.__main__ import main
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.config.validate import validate_config
from rlinf_vl.tools.memory.gpu_kinds import kind_of_size
from rlinf_vl.tools.memory.gpu_parts import GIB
from rlinf_vl.tools.memory.host_memory import host_memory
from rlinf_vl.tools.memory.hours import estimate_step, usual_lengths
from rlinf_vl.tools.memory.ledger import Hardware, ledger
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.tools.memory.search import HOST_GIB_PER_GPU, Search

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
MIXTURE = [
    "rollout.model.model_path=Qwen/Qwen3-VL-30B-A3B-Instruct",
    "rollout.model.model_type=auto",
]


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    """A small mixture of the true structure."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "head_dim": 64}
    tiny_config("qwen3_vl_moe", text=sizes).save_pretrained(folder)
    return [f"rollout.model.model_path={folder}", "rollout.model.model_type=auto"]


def found_on(hardware, overrides, **options):
    config = parse_config(FLAGSHIP, overrides)
    search = Search(config, hardware, kind_of_size(80), usual_lengths(config), **options)
    return search.run(max_layouts=2)


@pytest.mark.slow
def test_what_is_found_fits_and_can_be_pasted(overrides):
    hardware = Hardware.named(2, 80)
    found = found_on(hardware, overrides)
    assert found.layouts and not found.natural and found.tried > 10
    seconds = [layout.time.total for layout in found.layouts]
    assert seconds == sorted(seconds)
    for layout in found.layouts:
        config = parse_config(FLAGSHIP, [*overrides, *shlex.split(layout.overrides)])
        memory = ledger(config, hardware, Model(config))
        assert not memory.problems and memory.share == layout.ledger.share


@pytest.mark.slow
def test_no_placement_of_the_config_itself_is_faster_than_the_first(overrides):
    own = [*overrides, "cluster.component_placement={actor: 0, rollout: 1}"]
    own.append("actor.fsdp_config.gradient_checkpointing=none")
    hardware, config = Hardware.named(2, 80), parse_config(FLAGSHIP, own)
    first = found_on(hardware, own).layouts[0]
    model, placement = Model(config), placement_of(config, (2,))
    memory = ledger(config, hardware, model, placement)
    kind, lengths = kind_of_size(80), usual_lengths(config)
    estimate = estimate_step(memory.config, model, placement, kind, lengths, memory.kv_tokens)
    assert first.time.total <= estimate.total < first.slow.total * 100


@pytest.mark.slow
def test_host_memory_bounds_what_is_found(overrides):
    assert not found_on(Hardware.named(1, 80), overrides, host_bytes=2**30).layouts


@pytest.mark.slow
def test_the_verb_finds_a_mixtures_layouts_and_says_why_natural_ones_fail(capsys):
    assert main(["preflight", FLAGSHIP, "--gpus", "8", "--search", *MIXTURE]) == 0
    printed = capsys.readouterr().out
    assert "send on a h100" in printed and "1. `" in printed
    assert "as it is, does not fit: generate needs" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("size", "nodes"), [("30b-a3b", 1), ("235b-a22b", 8)])
def test_example_configs_of_mixtures_fit_their_machines(size, nodes):
    config = parse_config(f"qwen3-vl-{size}-grpo-fsdp-geo3k")
    validate_config(config)
    hardware, placement = Hardware.named(8, 80, nodes), placement_of(config, (8,) * nodes)
    model = Model(config)
    model.by_layers = True
    assert not ledger(config, hardware, model).problems
    host_bytes = sum(host_memory(config, model, placement, hardware.gpu_bytes).values())
    assert host_bytes <= 8 * HOST_GIB_PER_GPU * GIB
    if config.actor.fsdp_config.cpu_offload:  # its comment says why
        config.actor.fsdp_config.cpu_offload = False
        config.actor.enable_offload = True
        problems = ledger(config, hardware, model).problems
        assert any(problem.startswith("sync needs") for problem in problems)
