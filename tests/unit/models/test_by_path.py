"""Families that are not in the table, by the paths of their modules: they compute what transformers computes, or are refused."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tiny import (
    IMAGE_ID,
    IMAGE_TOKENS,
    MERGE,
    PAD,
    PATCH,
    TEXT,
    VIDEO_ID,
    VISION,
    VISION_END,
    VISION_START,
    answered,
    banned,
    group,
    pixels,
    tiny_config,
    transformers_logprobs,
)
from tiny import image as tiny_image
from tiny import request as tiny_request
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.models.family import submodules
from rlinf_vl.models.loading import (
    PARTS,
    copy_processor_files,
    load_model,
    part_of,
    use_packed_attention,
)
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.types import SamplingParams

PATHS = "model.visual", "model.language_model"
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION_2 = {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2} | {
    key: VISION[key]
    for key in ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")
}


def config_of(model_type: str, **text):
    """GLM-4V rotates neighbouring pairs, gates its MLP with one product and has four norms in a block; Qwen2-VL's tower is plain."""
    ids = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
    if model_type == "glm4v":
        tower = VISION | {"image_size": 4 * PATCH, "out_hidden_size": TEXT["hidden_size"]}
        ids |= {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
        ids |= {"video_start_token_id": 58, "video_end_token_id": 59}
    else:
        tower = VISION_2
        ids |= {"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
    return AutoConfig.for_model(
        model_type, text_config=TEXT | {"rope_parameters": ROPE} | text, vision_config=tower, **ids
    )


def model_of(model_type: str):
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(
        config_of(model_type), attn_implementation="sdpa"
    ).eval()


@pytest.mark.parametrize("model_type", ["glm4v", "qwen2_vl"])
def test_packed_logprobs_and_gradients_are_those_of_transformers(model_type):
    family = family_at(config_of(model_type), PATHS)
    rng = np.random.default_rng(0)
    groups = [
        group(rng, [(2, 3)], [5, 1, 9], "a"),
        group(rng, [], [4, 6], "b"),
        group(rng, [(1, 1), (5, 3)], [7, 3], "c"),
    ]
    members = [Member(g, i, [0.0]) for g in groups for i in range(len(g.trajectories))]
    theirs, ours = (
        model_of(model_type).train(),
        use_packed_attention(model_of(model_type), family).train(),
    )
    expected = torch.cat([transformers_logprobs(theirs, m.group, m.index) for m in members])
    policy = PolicyModel(ours, family, banned(), temperature=1.0, chunk=5)
    got, _ = policy(Collator(family, IMAGE_TOKENS, pixels, PAD)(members, run_vision=True))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, a), (_, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            atol = 1e-5 * max(1.0, float(a.grad.abs().max()))
            torch.testing.assert_close(b.grad, a.grad, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize("model_type", ["glm4v", "qwen2_vl"])
def test_the_torch_engine_samples_with_the_logprobs_of_transformers(model_type):
    family, rng = family_at(config_of(model_type), PATHS), np.random.default_rng(1)
    sampling = SamplingParams(max_new_tokens=8)
    requests = [
        tiny_request(rng, shapes, sampling, (1, 2)) for shapes in ([(2, 3)], [], [(4, 3), (1, 2)])
    ]
    places = {"image_tokens": IMAGE_TOKENS}
    model = use_packed_attention(model_of(model_type), family)
    engine = TorchEngine(model, family, banned=banned(), pixels=pixels, max_running=64, **places)
    try:
        completions = engine.generate(requests)
    finally:
        engine.close()
    for request, completion in zip(requests, completions, strict=True):
        g = answered(request, completion.samples)
        for i, sample in enumerate(completion.samples):
            expected = transformers_logprobs(model_of(model_type), g, i).detach()
            torch.testing.assert_close(
                torch.from_numpy(sample.logprobs), expected, atol=1e-5, rtol=0
            )


def test_parts_and_units_follow_from_the_model():
    family, model = family_at(config_of("glm4v"), PATHS), model_of("glm4v")
    parts = {
        part: [n for n, _ in model.named_parameters() if part_of(n, family) == part]
        for part in PARTS
    }
    assert all(n.startswith("model.visual.") for n in parts["vision_tower"] + parts["projector"])
    assert any("merger" in n for n in parts["projector"]) and any(
        ".blocks." in n for n in parts["vision_tower"]
    )
    assert {n.split(".")[0] for n in parts["language_model"]} == {"model", "lm_head"}
    units = [module for path in family.fsdp_units for module in submodules(model, path)]
    assert len(units) == 2 + 2 + 1 and units[-1] is model.model.visual
    prices = family.prices(model.config, True)
    assert prices.patch > 0 and prices.patch == pytest.approx(
        3 * family.prices(model.config, False).patch
    )


@pytest.mark.slow
def test_a_checkpoint_is_read_with_its_own_tokens_and_images(toy_folder, tmp_path):
    """Of GLM-4V, whose processor rounds sizes in a way of its own; with the toy's tokenizer."""
    copy_processor_files(toy_folder, tmp_path)
    written = {
        "image_processor_type": "Glm4vImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
    }
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(written | {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}})
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = config_of("glm4v", vocab_size=len(tokenizer))
    config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    family = family_of("auto", tmp_path, paths=PATHS)
    processor = Processor(tmp_path, family)
    assert (family.image_token, processor.image_token_id) == (
        "<|image_pad|>",
        config.image_token_id,
    )
    assert processor.banned_ids(len(tokenizer))[config.image_token_id]
    image, _ = tiny_image(np.random.default_rng(0), 5, 3)
    assert processor.pixels(image).shape == (np.prod(processor.grid(image)), 3 * 2 * PATCH**2)
    small = Processor(tmp_path, family, max_pixels=24 * 24)
    assert (
        0
        < np.prod(small.grid(image)) * PATCH**2
        <= 24 * 24
        < np.prod(processor.grid(image)) * PATCH**2
    )
    model = load_model(tmp_path, family, torch.float32)
    assert model.config.model_type == family.model_type == "glm4v"


def test_paths_of_a_known_family_must_be_its_own():
    config = tiny_config("qwen3_vl")
    assert family_at(config, PATHS) is family_of("qwen3_vl")
    assert family_at(tiny_config("qwen3_5"), PATHS) is family_of("qwen3_5")
    with pytest.raises(
        ValueError,
        match="vision_encoder_attr: 'model.visual.merger', but that of qwen3_vl is 'model.visual'",
    ):
        family_at(config, ("model.visual.merger", PATHS[1]))


@pytest.mark.parametrize(
    ("config", "paths", "said"),
    [
        (
            partial(config_of, "glm4v"), ("model.visul", PATHS[1]),
            r"attr: 'model.visul': model \(Glm4vModel\) has no module 'visul'; it has visual, language_model",
        ),
        (
            partial(config_of, "glm4v"), (PATHS[0], "modl.text"),
            r"language_model_attr: 'modl.text': the model \(Glm4v.*\) has no module 'modl'; it has model, lm_head",
        ),
        (partial(config_of, "glm4v"), (PATHS[0], "lm_head.text"), r"lm_head \(Linear\) has no module 'text'; it has none at all"),
        (partial(config_of, "glm4v"), ("model", PATHS[1]), "are not modules apart"),
        (partial(config_of, "glm4v"), (PATHS[0], "lm_head"), "language_model_attr: Linear has no list of layers"),
        (partial(tiny_config, "qwen3"), PATHS, "qwen3 is no vision-language model of transformers"),
        (
            partial(AutoConfig.for_model, "llava_next", text_config={"model_type": "qwen2"} | TEXT),
            ("model.vision_tower", PATHS[1]), "encodes images by pixel_values, image_sizes; only patches with their grids",
        ),
        (
            partial(config_of, "qwen2_vl", layer_types=["full_attention", "chunked_attention"]), PATHS,
            "has layers of chunked_attention; only full_attention and sliding_attention",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_refused(config, paths, said):
    with pytest.raises(ValueError, match=said):
        family_at(config(), paths)
