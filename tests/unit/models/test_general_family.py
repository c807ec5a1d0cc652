"""Models whose family has no file: their parts as transformers names them, tiles, and what is refused."""

import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_tiles import (
    GEMMA3_MARKS,
    INTERNVL_MARKS,
    TILE,
    TOKENS,
    write_gemma3,
    write_idefics3,
    write_internvl,
)
from transformers import AutoConfig, AutoModelForImageTextToText

from rlinf_vl.config.load import load_config
from rlinf_vl.models import tiles
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.models.image_tokens import ImageTokens, counted_positions
from rlinf_vl.models.loading import freeze, load_model, part_of, switch_dropout_off
from rlinf_vl.models.policy import encode_images, trains_images
from rlinf_vl.models.processing import Processor
from rlinf_vl.models.saving import save_model
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.check import certificates as certificates_module
from rlinf_vl.tools.check.certificates import Certificate, not_proven
from rlinf_vl.tools.check.checkpoint import checkpoint
from rlinf_vl.tools.check.smoke.checkpoint import _write_weights
from rlinf_vl.tools.verify.prove.member import member_of
from rlinf_vl.tools.verify.prove.proofs import Proofs
from rlinf_vl.types import ImageRef

WRITERS = {"internvl": write_internvl, "idefics3": write_idefics3, "gemma3": write_gemma3}
SGLANG = "rollout.rollout_backend=sglang"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def folder(folders):
    return folders["internvl"]


@pytest.fixture(scope="module")
def processors(folders):
    return {name: Processor(folder, family_of("auto", folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def processor(processors):
    return processors["internvl"]


def picture(width: int, height: int) -> tuple[ImageRef, Image.Image]:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return ImageRef.of(file.getvalue()), Image.fromarray(noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_prompts_and_pixels_are_those_of_transformers_processor(name, folders, processors):
    """One image of one tile, one of several with a thumbnail, in one prompt."""
    folder, processor = folders[name], processors[name]
    pictures = [picture(50, 47), picture(170, 60)]
    content = [
        {"type": "image"},
        {"type": "text", "text": "how many red"},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": content}]
    ids, grids = Renderer(processor).prompt(messages, [ref for ref, _ in pictures])
    theirs = tiles.images_processor(folder)
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    expected = theirs(images=[image for _, image in pictures], text=[text], return_tensors="np")
    assert ids.tolist() == expected["input_ids"][0].tolist()
    assert grids[:, 0].tolist() == {"internvl": [1, 4], "idefics3": [10, 7], "gemma3": [1, 1]}[name]
    assert (grids[:, 1:] == 1).all()
    rows = np.concatenate([processor.pixels(ref) for ref, _ in pictures])
    theirs_rows = expected["pixel_values"].reshape(-1, 3, TILE, TILE)
    theirs_rows = theirs_rows[theirs_rows.any(axis=(1, 2, 3))]  # without padding
    np.testing.assert_array_equal(rows.reshape(-1, 3, TILE, TILE), theirs_rows)


@pytest.mark.parametrize("name", WRITERS)
def test_a_turn_after_images_begins_with_the_ids_before_it(name, processors):
    """And the span of an imitated answer counts the ids around an image."""
    (ref, _) = picture(170, 60)
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}
    messages = [question, {"role": "assistant", "content": "a b"}]
    renderer = Renderer(processors[name])
    ids, [(start, end)], _ = renderer.conversation(messages, [ref], [1])
    prompt, _ = renderer.prompt([question], [ref])
    assert ids[:start].tolist() == prompt.tolist() and end == len(ids)
    assert processors[name].decode(ids[start:end]) == "a b"


def test_marks_of_images_are_never_sampled_nor_written_by_a_message(processors):
    marks = {
        "internvl": [INTERNVL_MARKS[f"{part}_image_token"] for part in ("start", "end", "context")],
        "idefics3": ["<fake_token_around_image>", "<image>", "<global-img>", "<row_3_col_3>"],
        "gemma3": list(GEMMA3_MARKS.values()),
    }
    for name, texts in marks.items():
        vocabulary = processors[name].tokenizer.get_vocab()
        ids = [vocabulary[text] for text in texts]
        assert processors[name].banned_ids(len(vocabulary))[ids].all()
        message = [{"role": "user", "content": " ".join(texts)}]
        prompt, _ = Renderer(processors[name]).prompt(message, [])
        assert not set(ids) & set(prompt.tolist())


def test_line_breaks_around_an_image_are_joined_with_those_of_the_template(processors):
    """As one token, which may be sampled."""
    processor = processors["gemma3"]
    (joined,) = processor.tokenizer("\n\n\n")["input_ids"]
    message = [{"role": "user", "content": [{"type": "image"}]}]
    prompt, _ = Renderer(processor).prompt(message, [picture(50, 47)[0]])
    assert (prompt == joined).sum() == 2
    assert not processor.banned_ids(len(processor.tokenizer))[joined]


def test_pan_and_scan_is_refused(folders, tmp_path):
    images = tiles.TileImages(folders["gemma3"])
    images._processor.images_kwargs = images._processor.images_kwargs | {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 8,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    with pytest.raises(ValueError, match="170×60 becomes 4 crops .* set do_pan_and_scan to false"):
        images.grid(60, 170)


def test_bounds_of_pixels_are_refused(folder):
    with pytest.raises(ValueError, match="data.image_max_pixels: 999, .* cuts images into tiles"):
        Processor(folder, family_of("auto", folder), max_pixels=999)


def test_parts_are_those_that_transformers_names(folder):
    family = family_of("auto", folder)
    assert (family.vision_tower, family.text_model) == (
        "model.vision_tower",
        "model.language_model",
    )
    assert family.blank_tokens == TOKENS and family.positions is counted_positions
    model = load_model(folder, family, torch.float32)
    parts = {name: part_of(name, family) for name, _ in model.named_parameters()}
    assert {part for name, part in parts.items() if "projector" in name} == {"projector"}
    assert parts["model.vision_tower.embeddings.cls_token"] == "vision_tower"
    # A projector that learns beside a frozen tower needs the tower's forward with a graph.
    freeze(model, family, ["vision_tower"])
    assert trains_images(model, family)
    freeze(model, family)
    assert not trains_images(model, family)


@pytest.mark.slow
def test_a_projector_learns_beside_a_frozen_tower():
    member = member_of(family_at(AutoConfig.for_model("llava")), AutoConfig.for_model("llava"), ".")
    proofs = Proofs(member)
    _, gradients = proofs._flat_reference
    policy = member.policy().train()
    freeze(policy.model, member.family, ["vision_tower"])
    trained = {n: gradients[n] for n, p in policy.model.named_parameters() if p.requires_grad}
    assert any("projector" in name for name in trained)
    figures = proofs._row_figures(proofs._flat, proofs._flat_reference[0], trained, policy=policy)
    assert max(figures) <= 1e-5
    assert all(p.grad is None for n, p in policy.model.named_parameters() if n not in trained)


def test_a_tower_that_drops_paths_drops_none_here(folder):
    config = AutoConfig.from_pretrained(folder)
    config.text_config.attention_dropout = config.vision_config.attention_dropout = 0.5
    config.vision_config.hidden_dropout_prob = 0.5
    switch_dropout_off(config)
    model = AutoModelForImageTextToText.from_config(config).train()
    tile, _ = tiles.blank_tile(config)
    pixels = torch.from_numpy(tile).view(1, 3, TILE, TILE)
    first, second = (model.model.get_image_features(pixels).pooler_output for _ in range(2))
    assert torch.equal(first, second)


def test_ids_around_and_between_tokens_are_written():
    tokens = ImageTokens(9, tokens_per_tile=2, marks=(7, 8))
    rendered, grids = np.array([1, 9, 2, 9], np.int32), np.array([[2, 1, 1], [1, 1, 1]])
    image_ids = [np.array([7, 9, 9, 8, 9, 9, 8]), np.array([7, 9, 9])]
    ids, lengths = tokens.expand(rendered, image_ids)
    assert ids.tolist() == [1, 7, 9, 9, 8, 9, 9, 8, 2, 7, 9, 9]
    assert lengths.tolist() == [1, 7, 1, 3]
    assert counted_positions(ids, grids, tokens)[1].tolist() == list(range(12))
    with pytest.raises(ValueError, match="6 image placeholder ids for 1 images that need"):
        counted_positions(ids, grids[:1], tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("video_llama_3", "its config has no spatial_merge_size"),
        ("janus", "makes tokens of 2048 numbers; those of the text model have 4096"),
        ("bert", "bert is no vision-language model of transformers"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(model_type, said):
    """Those that docs/models.md names are in tests/unit/docs/test_models_page.py."""
    config = AutoConfig.for_model(model_type)
    text = config.get_text_config()
    text.num_hidden_layers = 2
    with pytest.raises(ValueError, match=said):
        family_at(config)


@pytest.mark.slow
def test_two_tiles_in_the_wrong_order_are_found():
    """A fault that only images of several tiles show."""
    config = AutoConfig.for_model("internvl")
    member = member_of(family_at(config), config, ".")
    encode = member.family.encode_images

    def reversed_tiles(owner, patches, grids, dtype):
        return encode(owner, patches.flip(0), grids, dtype)

    wrong = replace(member, family=replace(member.family, encode_images=reversed_tiles))
    assert max(Proofs(member).packed()) <= 1e-5 < max(Proofs(wrong).packed())


@pytest.mark.slow
def test_an_export_has_the_buffers_that_checkpoints_have(tmp_path):
    """A mixture's router corrects by one; transformers would begin it anew, at zero."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    rope |= {"partial_rotary_factor": 0.5}
    config = AutoConfig.for_model(
        "glm4v_moe", text_config={"rope_parameters": rope, "head_dim": 128}
    )
    member = member_of(family_at(config), config, tmp_path)
    model = member.model()
    name = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).uniform_()
    save_model(model, member.family, tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(loaded.get_buffer(name), model.get_buffer(name))


@pytest.mark.slow
def test_a_type_that_was_proven_wrong_is_refused_where_the_path_is_taken(folder, monkeypatch):
    wrong = Certificate(
        "internvl", {"packed": (0.0,)}, {"lora": "differs by 3.0e-01"}, {}, "5.23.0"
    )
    monkeypatch.setattr(certificates_module, "certificates", lambda: {"internvl": wrong})
    path = f"rollout.model.model_path={folder}"
    assert list(checkpoint(load_config("toy-grpo-cpu", [path]))) == []
    (problem,) = checkpoint(load_config("toy-grpo-cpu-lora", [path]))
    assert "not computed here as in transformers 5.23.0 (lora: differs by 3.0e-01)" in problem
    monkeypatch.setattr(certificates_module, "certificates", dict)
    assert "run rlinf-vl prove-family" in not_proven("internvl") and not not_proven("qwen3_vl")


def test_tiles_of_unequally_many_tokens_are_refused(folder, monkeypatch):
    process = tiles.TileImages._process

    def with_one_more(self, image):
        rows, ids = process(self, image)
        return rows, np.append(ids, self._id)

    images = tiles.TileImages(folder)
    monkeypatch.setattr(tiles.TileImages, "_process", with_one_more)
    with pytest.raises(ValueError, match="becomes 37 placeholders of 4 tiles, not 36, 9 a tile"):
        images.grid(60, 170)
    monkeypatch.setattr(tiles.TileImages, "_process", lambda *_: (np.zeros((2, 3)), np.zeros(3)))
    with pytest.raises(ValueError, match="only tiles of equally many tokens"):
        tiles.TileImages(folder)


def test_a_blank_image_has_all_its_tokens(folders):
    """Idefics 3 takes tiles of zeros for padding, and images are blanked to see whether the policy looks at them."""
    family = family_of("auto", folders["idefics3"])
    model = load_model(folders["idefics3"], family, torch.float32)
    blank = np.zeros((2, 3 * TILE * TILE), np.float32)
    features = encode_images(model, family, blank, np.array([[2, 1, 1]]), "cpu")
    assert features.tokens.shape == (2 * TOKENS, 48)
    assert torch.equal(features.tokens[:TOKENS], features.tokens[TOKENS:])


def test_a_processor_that_writes_another_placeholder_is_refused(folder):
    with pytest.raises(ValueError, match="writes id .* but the config names id 5"):
        tiles.TileImages(folder).image_tokens(5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internvl", "llava"])
def test_random_weights_are_all_written(name, tmp_path):
    """InternVL's layer scales belong to its tower, and LLaVA's class token to a CLIP inside."""
    content = json.loads((certificates_module.FOLDER / f"{name}.json").read_text())
    config = AutoConfig.for_model(**content["member"])
    family = family_at(config)
    with torch.device("meta"):
        model = family.model_class.from_config(config)
    _write_weights(model, family, tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert not [key for key, value in state.items() if not value.isfinite().all()]
    if name == "internvl":
        scale = state["model.vision_tower.encoder.layer.0.lambda_1"]
        assert torch.equal(scale, config.vision_config.layer_scale_init_value * torch.ones(32))


def test_python_of_a_trusted_checkpoint_cuts_its_images(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mine.py").write_text(
        "from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (\n"
        "    GotOcr2ImageProcessorPil,\n)\n\n\n"
        "class Mine(GotOcr2ImageProcessorPil):\n    pass\n"
    )
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"auto_map": {"AutoImageProcessor": "mine.Mine"}}
    file.write_text(json.dumps(settings | {"image_processor_type": "Mine"}))
    family = family_of("auto", tmp_path, trust_remote_code=True)
    processor = Processor(tmp_path, family, trust_remote_code=True).image_processor
    assert type(processor._processor.image_processor).__name__ == "Mine"


@pytest.mark.parametrize("key", ["logits_scaling", "final_logit_softcapping"])
def test_changed_logits_are_refused(key):
    config = AutoConfig.for_model("llava")
    setattr(config.text_config, key, 8.0)
    with pytest.raises(ValueError, match=rf"llava changes its logits \({key}: 8.0\)"):
        family_at(config)


@pytest.mark.slow
def test_what_sglang_can_not_run_is_refused_and_so_is_a_type_that_is_named(folder, monkeypatch):
    def problems(*overrides):
        path = f"rollout.model.model_path={folder}"
        return list(checkpoint(load_config("toy-grpo-cpu", [path, *overrides])))

    assert problems() == problems(SGLANG) == []
    (problem,) = problems("rollout.model.model_type=qwen3_vl")
    assert "'internvl'; set rollout.model.model_type=auto" in problem
    (problem,) = problems(SGLANG, "rollout.tensor_parallel_size=2")
    assert problem.startswith("rollout.tensor_parallel_size: 2, ") and "set it 1" in problem
    proven = certificates_module.certificates()["internvl"]
    refused = replace(proven, paths={"packed": (0.0,)}, refused={"sglang": "no such mask"})
    monkeypatch.setattr(certificates_module, "certificates", lambda: {"internvl": refused})
    (problem,) = problems(SGLANG)
    assert "can't run models of type 'internvl': no such mask" in problem
    assert "set rollout.rollout_backend=torch" in problem and problems() == []
    wrong = replace(proven, wrong={"sglang": "differs by 3.0e-01"})
    monkeypatch.setattr(certificates_module, "certificates", lambda: {"internvl": wrong})
    (problem,) = problems(SGLANG)
    assert "(sglang: differs by 3.0e-01)" in problem and problems() == []


def test_a_path_that_nobody_has_proven_is_told(monkeypatch):
    proven = certificates_module.certificates()["internvl"]
    without = replace(proven, paths={"packed": (0.0,)})
    monkeypatch.setattr(certificates_module, "certificates", lambda: {"internvl": without})
    assert "the path 'sglang' of models of type 'internvl'" in not_proven("internvl", "sglang")
    assert not not_proven("internvl") and not not_proven("qwen3_vl", "sglang")


@pytest.mark.slow
def test_sglang_needs_the_sections_of_mrope():
    """By which it tells the positions of images; checkpoints have them, a class's default may not."""
    config = AutoConfig.for_model("qwen2_vl")
    (reason,) = family_at(config).sglang_refusals(config.to_dict(), on_cpu=False)
    assert "no mrope_section" in reason
    config.text_config.rope_parameters["mrope_section"] = [16, 24, 24]
    assert not family_at(config).sglang_refusals(config.to_dict(), on_cpu=False)
