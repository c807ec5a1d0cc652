"""Tiny members of the families on the real SGLang engine, in float32: it computes what transformers computes, follows every weight
it is sent, and loads what is exported. Figures go to docs/models.md (`figures`)."""

import copy
import json
from functools import partial

import numpy as np
import pytest
from figures import keep
from many_images import MOST, differences, ratio
from plain_step import Mixtures
from sglang_toy import Toy, engine_of, furthest, write_member
from tiny import tiny_model

from rlinf_vl.extras.toy.files import write_toy_files
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.saving import save_model
from rlinf_vl.packing.collator import Collator

pytestmark = pytest.mark.integration
TOLERANCE = 5e-5
#: Family → sizes of its member. The MoE is saved by transformers, in a layout that SGLang can't read.
SIZES = {
    "qwen3_vl_moe": {
        "text": {
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        }
        | {"mlp_only_layers": []},
        "vision": {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "patch_size": 8},
    },
    "qwen2_5_vl": {
        "text": {"num_hidden_layers": 3},
        "vision": {"patch_size": 14, "window_size": 56, "depth": 3},
    },
    "qwen3": {"text": {"num_hidden_layers": 3}},
}
#: Parts of a model whose weights come apart from the others', by what their names have in them.
PARTS = {
    "qwen3_vl": ("visual", "language_model"),
    "qwen3_vl_moe": ("visual", "language_model", "experts"),
    "qwen2_5_vl": ("visual", "language_model", "attn.qkv"),
    "qwen3": ("self_attn", "mlp"),
}


@pytest.fixture(scope="module", params=["qwen3_vl", *SIZES])
def member(request, tmp_path_factory):
    """A checkpoint, and the engine on it: of qwen3_vl those of the whole folder."""
    if request.param not in SIZES:
        yield request.getfixturevalue("toy"), request.getfixturevalue("live_engine")()
        return
    family = family_of(request.param)
    made = Toy(
        tmp_path_factory.mktemp(request.param),
        family,
        lambda path: write_member(request.param, SIZES[request.param], path),
    )
    engine = engine_of(
        made, context_length=1024, report_routes=family.mixture(made.model.config) is not None
    )
    yield made, engine
    engine.close()


def images_of(made):
    return range(4) if made.family.vision_tower else [0]


def test_logprobs_are_those_of_transformers(member):
    """0 to 3 images of different sizes, alone and as groups, all in one batch."""
    made, engine = member
    requests = [
        made.request(k, n, temperature=t) for k in images_of(made) for n, t in ((1, 1.0), (3, 0.7))
    ]
    keep(
        made.family.model_type,
        "sglang",
        furthest(engine, made, made.model, requests),
        limit=TOLERANCE,
    )


def test_routes_are_those_of_transformers(member):
    """Of prompts that were computed before as well, and in the order of the router's probabilities."""
    made, engine = member
    watched = Mixtures(copy.deepcopy(made.model), 3)
    for _ in range(2):
        requests = [made.request(k, n) for k in images_of(made) for n in (1, 3)]
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            for sample in completion.samples:
                if engine.requests.mixture is None:
                    assert not sample.columns
                    continue
                expected = watched.chosen(
                    partial(made.logp, request, sample.ids, model=watched.model)
                )
                routes = sample.columns["routes"]
                assert routes.dtype == np.uint8 and not routes[-1].any()
                np.testing.assert_array_equal(routes[:-1], expected[:-1])


def test_weights_of_each_part_are_followed(member):
    """Sent alone, in two buckets; what SGLang ignores leaves it with the old ones."""
    made, engine = member
    requests = [made.request(k, 2) for k in images_of(made)[::3]]
    ids = np.arange(5, 13, dtype=np.int32)
    for part in PARTS[made.family.model_type]:
        other, changed = made.perturbed(part)
        names = list(changed)
        engine.load_weights(
            [{n: changed[n] for n in half} for half in (names[::2], names[1::2]) if half], version=1
        )
        assert furthest(engine, made, other, requests) <= TOLERANCE, part
        moved = made.logp(requests[-1], ids, model=other) - made.logp(requests[-1], ids)
        assert moved[:, ~made.banned].abs().max() > 20 * TOLERANCE, part
        engine.load_weights([made.weights()], version=0)
    assert furthest(engine, made, made.model, requests) <= TOLERANCE


def test_every_weight_of_the_engine_is_written_by_a_sync(member):
    """SGLang's own checksums of its tensors, which a sync puts back after all were made random."""
    made, engine = member

    def check(action):
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        # Which is no weight.
        asked = CheckWeightsReqInput(action=action, skip_tensor_list=["axis_map"])
        done, message, ranks, _ = engine.host.run(engine.host.manager.check_weights, asked).result()
        assert done, message
        return ranks and ranks[0]["checksums"]

    before = check("checksum")
    check("reset_tensors")
    random = check("checksum")
    assert len(before) > 20 and not {name for name in before if random[name] == before[name]}
    engine.load_weights([made.weights()], version=0)
    assert check("checksum") == before


def test_what_is_exported_loads_in_sglang(member, tmp_path):
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    made, engine = member
    other, _ = made.perturbed("")
    save_model(other, made.family, tmp_path)
    asked = UpdateWeightFromDiskReqInput(model_path=str(tmp_path), load_format="auto")
    assert engine.host.run(engine.host.manager.update_weights_from_disk, asked).result()[0]
    engine.requests.towers += 1
    assert furthest(engine, made, other, [made.request(k, 2) for k in images_of(made)]) <= TOLERANCE
    engine.load_weights([made.weights()], version=0)


def test_several_images_are_no_further_off_than_one(member):
    """One to eight images of different sizes."""
    made, engine = member
    if not made.family.vision_tower:
        pytest.skip("text only")
    rng, side = (
        np.random.default_rng(0),
        made.family.token_side(made.model.config.vision_config.to_dict()),
    )
    counts = [1] * 6 + list(range(2, 9))
    shown = [
        [made.image(rng, side * rng.integers(1, 5, 2)) for _ in range(count)] for count in counts
    ]
    requests = [made.request(tuple(images), 6, stop_ids=()) for images in shown]
    processor, model = made.processor, use_packed_attention(copy.deepcopy(made.model), made.family)
    off = differences(
        engine,
        requests,
        PolicyModel(model, made.family, made.banned, temperature=1.0, chunk=None),
        Collator(
            made.family,
            processor.image_tokens,
            made.pixels,
            processor.pad_id,
        ),
    )
    assert list(off) == list(range(1, 9)) and off[1].mean() < 2e-6
    keep(made.family.model_type, "images sglang", ratio(off), limit=MOST)


def test_names_and_layouts_of_transformers_own_are_refused(member):
    made, engine = member
    own = {name: p.detach() for name, p in made.model.named_parameters()}
    foreign = {n: p for n, p in own.items() if engine.shapes.get(n) != tuple(p.shape)}
    assert bool(foreign) == (made.family.model_type in ("qwen3_vl_moe", "qwen2_5_vl"))
    for name, value in foreign.items():
        with pytest.raises(ValueError, match="does not fit the engine's"):
            engine.load_weights([{name: value}], version=1)
    assert engine.alive()
    engine.load_weights([made.weights()], version=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"])
def test_sglang_reads_what_a_config_of_transformers_lacks(name, tmp_path):
    """It knows which layers attend by their distance; and adds up the weights of experts to 1 where the config says so."""
    from sglang.srt.configs.model_config import ModelConfig

    family, model = family_of(name), tiny_model(family=name)
    text = model.config.text_config
    text.__dict__.pop("full_attention_interval", None)
    text.norm_topk_prob = False
    model.save_pretrained(tmp_path / "theirs")
    save_model(model, family, tmp_path / "ours")
    overrides = json.dumps(family.engine_config(model.config))
    for folder, others in (("theirs", overrides), ("ours", "{}")):
        write_toy_files(tmp_path / folder)
        read = ModelConfig(str(tmp_path / folder), model_override_args=others).hf_text_config
        if name != "qwen3_5":
            assert read.norm_topk_prob
        if name != "qwen3_vl_moe":
            kinds = [kind.removeprefix("full_") for kind in text.layer_types]
            assert read.layers_block_type == kinds == ["linear_attention", "attention"]
