"""The memory ledger: closed forms, what it refuses, and that what it advises fits."""

import dataclasses

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.engines.base import WAKE_RESERVE_BYTES
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.memory.ledger import (
    MARGIN_BYTES,
    RESERVE_BYTES,
    Gpu,
    Hardware,
    largest_budget,
    ledger,
    settled_configs,
)
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.tools.memory.table import render

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
GIB = 2**30
TRAINED, TOTAL, ROOT = 1_720_574_976, 2_127_532_032, 151937 * 2048
CLUSTERS = [Hardware.named(1, 80), Hardware.named(8, 80), Hardware.named(8, 80, nodes=2)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(parse_config(FLAGSHIP))


#: What takes the least memory, and so what does not depend on the hardware.
SMALLEST = (
    "actor.fsdp_config.gradient_checkpointing=full",
    "actor.fsdp_config.reshard_after_forward=true",
)


def made(model, *overrides, on=CLUSTERS[0]):
    return ledger(parse_config(FLAGSHIP, [*SMALLEST, *overrides]), on, model)


AUTOMATIC = tuple(text.partition("=")[0] + "=auto" for text in SMALLEST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "tokens", "chosen"),
    [
        ((8, 80), 16384, ("none", False)),
        ((8, 48), 16384, ("selective", True)),
        ((8, 24), 6144, ("mlp", True)),
        ((1, 24), 16384, ("full", True)),
    ],
)
def test_auto_is_the_fastest_that_leaves_a_twentieth(model, cards, tokens, chosen):
    """The first alternative whose training leaves a twentieth of the memory free, or else the smallest."""
    hardware, budget = Hardware.named(*cards), f"runner.max_tokens_per_mbs={tokens}"
    found = made(model, *AUTOMATIC, budget, on=hardware)
    fsdp = found.config.actor.fsdp_config
    assert (fsdp.gradient_checkpointing, fsdp.reshard_after_forward) == chosen
    assert found.settled == ("gradient_checkpointing", "reshard_after_forward")
    for config in settled_configs(parse_config(FLAGSHIP, [*AUTOMATIC, budget])):
        settings = config.actor.fsdp_config
        needed = sum(ledger(config, hardware, model).gpus[0].phases["train"].values())
        if (settings.gradient_checkpointing, settings.reshard_after_forward) == chosen:
            assert needed <= 0.95 * hardware.usable or cards[0] == 1
            break
        assert needed > 0.95 * hardware.usable
    assert "gradient_checkpointing " + chosen[0] + " (auto)" in render(found)


@pytest.mark.slow
def test_what_is_said_is_kept_where_the_rest_is_auto(model):
    """On one GPU weights are always gathered once, whatever is chosen."""
    found = made(model, AUTOMATIC[1], "runner.max_tokens_per_mbs=4096")
    fsdp = found.config.actor.fsdp_config
    assert (fsdp.gradient_checkpointing, fsdp.reshard_after_forward) == ("full", False)
    assert found.settled == ("reshard_after_forward",)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", CLUSTERS, ids=str)
def test_the_flagship_fits_on_80_gb_as_it_is(model, hardware):
    found = made(model, on=hardware)
    assert not found.problems
    (gpu,) = found.gpus
    assert gpu.role == "collocated" and gpu.peak[0] <= hardware.usable < 80 * GIB
    assert 0.5 < found.share <= 0.85 and found.kv_tokens > 64 * 3072


@pytest.mark.slow
def test_parts_are_closed_forms(model):
    one, eight = (made(model, on=hardware).gpus[0].phases for hardware in CLUSTERS[:2])
    # Master weights in float32, the frozen tower's too.
    assert one["generate"]["parameters"] == 4 * TOTAL
    assert one["generate"]["optimizer"] == 8 * TRAINED
    assert one["train"]["gradients"] == 4 * TRAINED
    # Bfloat16; the tower's features come from the cache.
    assert one["train"]["gathered weights"] == 2 * TRAINED
    assert one["generate"]["engine weights"] == 2 * TOTAL
    assert one["generate"]["vision cache"] == GIB
    assert eight["train"]["optimizer"] == pytest.approx(TRAINED, rel=1e-3)  # 8 bytes over 8 ranks
    assert eight["train"]["gradients"] == pytest.approx(4 * TRAINED / 8, rel=1e-3)
    assert eight["train"]["gathered weights"] < one["train"]["gathered weights"] / 2
    # One rank cuts whole units on the device, of which the embedding is the largest; eight read shards.
    assert one["load"]["parameters"] == pytest.approx(4 * (TOTAL + 151936 * 2048), rel=1e-4)
    assert eight["load"]["parameters"] == pytest.approx(4 * TOTAL / 8, rel=1e-3)


@pytest.mark.slow
def test_quantized_weights_are_whole_in_every_rank():
    lora, nf4 = ["actor.model.is_lora=true"], "actor.model.lora.quantization=nf4"

    def found(*overrides):
        config = parse_config(FLAGSHIP, [*SMALLEST, *lora, *overrides])
        model = Model(config)
        return [
            ledger(config, hardware, model).gpus[0].phases["train"] for hardware in CLUSTERS[:2]
        ]

    (one, eight), (dense, _) = found(nf4), found()
    layers = 28 * (3 * 6144 * 2048 + 2 * 2048 * 2048 + 2 * 1024 * 2048)  # what adapters are on
    assert (
        one["4-bit weights"]
        == eight["4-bit weights"]
        == pytest.approx(layers * 4.127 / 8, rel=1e-3)
    )
    assert dense["parameters"] - one["parameters"] == 2 * layers and "4-bit weights" not in dense
    assert one["optimizer"] == dense["optimizer"]
    # But for one, dense for a moment.
    assert dense["gathered weights"] - one["gathered weights"] == 2 * (layers - 6144 * 2048)
    assert eight["parameters"] < one["parameters"] / 7


@pytest.mark.slow
def test_what_settings_change(model):
    def phases(*overrides, on=CLUSTERS[0]):
        return made(model, *overrides, on=on).gpus[0].phases

    plain = phases()
    offloaded = phases("actor.enable_offload=true")
    assert "parameters" not in offloaded["generate"] and offloaded["train"] == plain["train"]
    assert offloaded["generate"]["KV cache"] > plain["generate"]["KV cache"]
    per_node, one_node = (
        phases("actor.fsdp_config.strategy=hsdp", on=CLUSTERS[2]),
        phases(on=CLUSTERS[1]),
    )
    assert per_node["train"] == one_node["train"] != phases(on=CLUSTERS[2])["train"]
    on_host = phases("actor.fsdp_config.cpu_offload=true")
    assert (
        on_host["train"]["parameters"]
        == on_host["train"]["optimizer"]
        == 0
        < on_host["train"]["gathered weights"]
    )
    zero2 = phases("actor.fsdp_config.reshard_after_forward=false", on=CLUSTERS[1])
    assert (
        zero2["train"]["gradients"] == 4 * TRAINED
        and zero2["train"]["gathered weights"] == 2 * TRAINED
    )
    with_reference = phases("algorithm.kl_beta=0.01")
    assert with_reference["generate"]["reference"] == 2 * TOTAL
    assert "reference" not in plain["generate"]


def test_ranks_of_a_node_share_the_weights_by_the_placement_that_a_run_was_given(model):
    """`automatic` knows the GPUs of all nodes together."""
    config = parse_config(
        FLAGSHIP, [*SMALLEST, "actor.fsdp_config.strategy=hsdp", "cluster.num_nodes=2"]
    )
    placed = placement_of(config, (8, 8))
    given = ledger(config, Hardware(16, CLUSTERS[2].gpu_bytes), model, placed)
    planned = ledger(config, CLUSTERS[2], model)
    assert given.gpus[0].phases["train"] == planned.gpus[0].phases["train"]
    assert given.share == planned.share


def test_auto_leaves_a_reserve_where_engines_wake_beside_ranks(model):
    """So much, and not a hundredth of the GPU more."""
    made_here = made(model, "actor.enable_offload=false")
    (gpu,) = made_here.gpus
    free = made_here.hardware.gpu_bytes - sum(gpu.phases["generate"].values())
    assert made_here.share < 0.85
    margin = RESERVE_BYTES + MARGIN_BYTES
    assert margin <= free < margin + 0.011 * made_here.hardware.gpu_bytes
    assert "(auto, which leaves 3 GiB free where it can)" in render(made_here)


def test_auto_gives_up_its_margin_before_the_cache_of_a_group(model):
    """On the smallest card that holds a group of responses at all."""
    roomy = made(model, "actor.enable_offload=false")
    parts = roomy.gpus[0].phases["generate"]
    config = roomy.config
    group_tokens = config.algorithm.group_size * config.runner.seq_length
    group_bytes = group_tokens * parts["KV cache"] / roomy.kv_tokens
    others = sum(parts.values()) - parts["KV cache"]
    card = Hardware(1, int(others + group_bytes + WAKE_RESERVE_BYTES + 0.25 * GIB))
    tight = made(model, "actor.enable_offload=false", on=card)
    free = card.gpu_bytes - sum(tight.gpus[0].phases["generate"].values())
    assert tight.kv_tokens >= group_tokens
    assert WAKE_RESERVE_BYTES <= free < RESERVE_BYTES + MARGIN_BYTES


def test_a_margin_that_is_too_small_is_said():
    gpu = Gpu("collocated", {"train": {"activations": 20 * GIB}})
    assert gpu.peak_text(24 * GIB) == "at most 20.0 of 24.0 GiB, in train"
    assert gpu.peak_text(22 * GIB).endswith(", with 2.0 free where 3 are safe")
    assert gpu.peak_text(19 * GIB) == "at most 20.0 of 19.0 GiB, in train"


@pytest.mark.slow
def test_a_teacher_has_weights_and_image_features_of_its_own(model):
    config = parse_config(
        FLAGSHIP, [*SMALLEST, "algorithm.distillation.teacher_path=Qwen/Qwen3-VL-2B-Instruct"]
    )
    taught = ledger(config, CLUSTERS[1]).gpus[0].phases["train"]
    alone = made(model, on=CLUSTERS[1]).gpus[0].phases["train"]
    hint = "algorithm.distillation.privileged_template='{answer}'"
    own = ["algorithm.distillation.teacher_path=self", hint, "rollout.max_turns=1"]
    self_taught = (
        ledger(parse_config(FLAGSHIP, [*SMALLEST, *own]), CLUSTERS[1]).gpus[0].phases["train"]
    )
    assert self_taught == taught, "the policy is such a model, too"
    two = parse_config(
        FLAGSHIP,
        [
            *SMALLEST,
            "algorithm.distillation.teachers={a: Qwen/Qwen3-VL-2B-Instruct, "
            "b: Qwen/Qwen3-VL-4B-Instruct, c: Qwen/Qwen3-VL-2B-Instruct}",
            "algorithm.distillation.teacher_key=kind",
        ],
    )
    both = ledger(two, CLUSTERS[1]).gpus[0].phases["train"]
    assert both["teacher"] > 2.5 * taught["teacher"], "the second is of 4B parameters"
    assert both["vision cache"] == 3 * alone["vision cache"]
    assert both["gathered weights"] > taught["gathered weights"]
    assert taught["teacher"] == pytest.approx(2 * TOTAL / 8, rel=1e-3)
    assert taught["vision cache"] == 2 * alone["vision cache"] and "teacher" not in alone
    assert (
        taught["parameters"] == alone["parameters"]
        and taught["gathered weights"] > alone["gathered weights"]
    )


@pytest.mark.slow
def test_ranks_that_share_rows_have_a_part_of_the_activations():
    """Of the same row; a chunk of logits does not shrink."""
    budget = "runner.max_tokens_per_mbs=32768"
    one, part = (
        ledger(
            parse_config(FLAGSHIP, [*SMALLEST, budget, f"actor.context_parallel_size={n}"]),
            CLUSTERS[1],
        )
        .gpus[0]
        .phases["train"]["activations"]
        for n in (1, 4)
    )
    assert one / 5 < part < 0.7 * one


def test_split_gpus_have_tables_of_their_own(model):
    split = "cluster.component_placement={actor: 0-5, rollout: 6-7}"
    found = made(model, split, on=CLUSTERS[1])
    actor, rollout = found.gpus
    assert (actor.role, rollout.role) == ("actor", "rollout") and not found.problems
    assert (
        "KV cache" not in actor.phases["generate"]
        and "parameters" not in rollout.phases["generate"]
    )
    assert found.share == 0.85
    assert "train" not in rollout.phases


def test_a_cache_apart_from_ranks_leaves_room_for_the_weights_that_arrive(model):
    """Its engines keep their KV cache in a sync, so `auto` may not fill the GPU in generation."""
    split = "cluster.component_placement={actor: 0-5, rollout: 6-7}"
    rollout = made(model, split, on=Hardware.named(8, 24)).gpus[1]
    generate, sync = (sum(rollout.phases[phase].values()) for phase in ("generate", "sync"))
    usable = Hardware.named(8, 24).usable
    assert sync - generate == rollout.phases["sync"]["buckets in flight"] > GIB
    assert 0.98 * usable < sync <= usable


def test_a_small_gpu_is_refused_and_many_are_not(model):
    small = made(model, on=Hardware.named(1, 24))
    assert small.problems and all("GiB on a GPU" in problem for problem in small.problems)
    assert small.kv_tokens == 0
    assert not made(model, on=Hardware.named(8, 48)).problems


def test_an_engine_without_room_for_a_group_is_refused(model):
    found = made(model, "rollout.gpu_memory_utilization=0.06")
    assert "less than one group of 8 responses" in found.problems[0]


@pytest.mark.slow
def test_the_largest_budget_fits_and_more_does_not(model):
    found = made(model)
    budget = largest_budget(found, model)
    assert budget == 4 * 16384  # as far as it looks
    assert not made(model, f"runner.max_tokens_per_mbs={budget}").problems


def test_gpus_go_by_the_size_printed_on_them():
    """What the driver reports of an A100 of 80 GB is 79.1 GiB, of an H100 79.6; of an RTX 4090 of 24 GB 23.6."""
    assert 78 * GIB < Hardware.named(1, 80).gpu_bytes < 79.1 * GIB
    assert 23.5 * GIB < Hardware.named(1, 24).gpu_bytes <= 23.65 * GIB


@pytest.mark.slow
def test_the_verb(capsys):
    fits = ["preflight", FLAGSHIP, "--gpus", "8", "runner.max_tokens_per_mbs=4096"]
    assert main(fits) == 0
    said = capsys.readouterr().out
    assert "| collocated" in said and "KV cache of" in said and "on 8 GPUs of 78.8 GiB" in said
    assert "- node 0: slots 0-7: actor ranks 0-7 and engines 0-7\n" in said
    assert main(["preflight", FLAGSHIP, "rollout.gpu_memory_utilization=0.75"]) == 1
    said = capsys.readouterr().out
    assert "does not fit: generate needs" in said
    assert "- advice: set rollout.gpu_memory_utilization=auto: then generate takes" in said
    for wrong, named in (
        (["preflight", "toy-grpo-cpu"], "cluster.device"),
        (["preflight", FLAGSHIP, "rollout.model.model_path=no/such"], "rollout.model.model_path"),
        (["preflight", FLAGSHIP, "rollout.model.model_type=foo"], "rollout.model.model_type"),
        (["preflight", FLAGSHIP, "runner.max_tokens_per_mbs=0"], "runner.max_tokens_per_mbs"),
        (["preflight", FLAGSHIP, "--gpus", "0"], "no slots: the cluster has none"),
        (
            ["preflight", FLAGSHIP, "cluster.component_placement={actor: 0-3, rollout: 4}"],
            "wants slot",
        ),
    ):
        assert main(wrong) == 2
        assert named in capsys.readouterr().err


def test_options_and_overrides_in_any_order(capsys):
    with pytest.raises(SystemExit):
        main(["preflight", FLAGSHIP, "--gpu", "1", "--colour"])
    with pytest.raises(SystemExit):
        main(["watch", "folder", "runner.max_steps=3"])


@pytest.mark.slow
def test_a_local_model_folder_is_read(tmp_path, model):
    from tiny import tiny_model

    tiny_model().config.save_pretrained(tmp_path)
    found = ledger(
        parse_config(FLAGSHIP, SMALLEST),
        CLUSTERS[0],
        Model(parse_config(FLAGSHIP, SMALLEST), str(tmp_path)),
    )
    assert found.shape_source == "its config.json" and not found.problems
    assert found.gpus[0].phases["train"]["parameters"] < 2**20


def test_a_model_without_a_tower_has_no_phase_of_images(tmp_path):
    from tiny import tiny_config

    tiny_config("qwen3").save_pretrained(tmp_path)
    made = Model(parse_config(FLAGSHIP, SMALLEST), str(tmp_path))
    found = ledger(parse_config(FLAGSHIP, SMALLEST), CLUSTERS[0], made)
    assert made.weights.tower == 0 and not found.problems
    assert not any(
        p.get("vision cache") or "activations" in p for p in [found.gpus[0].phases["images"]]
    )
    assert found.gpus[0].phases["train"]["activations"] > 0


def test_a_table_has_every_part(model):
    found = made(model)
    text = render(found)
    for part in {
        part for phase in found.gpus[0].phases.values() for part, size in phase.items() if size
    }:
        assert f"| {part}" in text
    assert dataclasses.replace(found, problems=("x",)) != found
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 80


def test_engines_that_could_not_be_placed_are_refused(model):
    two = "rollout.tensor_parallel_size=2"
    assert made(model, two, on=CLUSTERS[1]).gpus[0].role == "collocated"
    with pytest.raises(ConfigError, match="rollout.tensor_parallel_size: 2"):
        made(model, two, "cluster.component_placement={actor: 0-3, rollout: 4-6}", on=CLUSTERS[1])


def test_a_budget_beyond_all_gpus_is_refused_before_it_is_traced(model):
    with pytest.raises(ConfigError, match="runner.max_tokens_per_mbs: 100000000"):
        made(model, "runner.max_tokens_per_mbs=100000000")
