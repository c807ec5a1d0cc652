"""The toy checkpoint: it loads with transformers' own classes, tokenizes anything, and says what is planted in it."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from demonstration_batch import demonstrated_sequences, demonstration_batch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlinf_vl.data.images import decode
from rlinf_vl.extras.toy import drawings as task
from rlinf_vl.extras.toy import files as toy_files
from rlinf_vl.extras.toy import model as toy
from rlinf_vl.extras.toy import warm_start
from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
from rlinf_vl.extras.toy.task import toy_of
from rlinf_vl.models.processing import PixelCache

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    warm_start.build_toy_checkpoint(folder, seed=7, progress=False, steps=2)
    return folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil.from_pretrained(checkpoint)


def _rendered(tokenizer, messages: list[dict], **kwargs) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


@pytest.mark.slow
def test_folder_holds_what_loaders_look_for(checkpoint: Path) -> None:
    assert {p.name for p in checkpoint.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    rope = json.loads((checkpoint / "config.json").read_text())["text_config"]["rope_parameters"]
    assert rope["rope_type"] == "default" and rope["mrope_interleaved"] is True
    assert sum(rope["mrope_section"]) == 32 // 2


def test_model_loads_whole(checkpoint: Path) -> None:
    model, info = AutoModelForImageTextToText.from_pretrained(checkpoint, output_loading_info=True)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert 0.85e6 < sum(p.numel() for p in model.parameters()) < 0.95e6
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_special_ids_agree(checkpoint: Path, tokenizer) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    assert tokenizer.pad_token == "<|endoftext|>" and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.unk_token is None and tokenizer.bos_token is None
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in toy_files.SPECIAL_TOKENS}
    assert ids == toy_files.special_ids()
    assert model.config.image_token_id == ids["<|image_pad|>"]
    assert model.config.vision_start_token_id == ids["<|vision_start|>"]
    assert model.generation_config.eos_token_id == [ids["<|im_end|>"]]
    assert len(tokenizer) <= model.config.text_config.vocab_size < len(tokenizer) + 8


@pytest.mark.parametrize(
    "text",
    [
        "What is the area?",
        r"In $\triangle ABC$, $m\angle A = 42^{\circ}$, find $\frac{x}{2}$.",
        "∠ABC ≅ ∠DEF, √3·π°",
        "日本語 и русский 🦊👩‍👩‍👧 é",
        "\x00\x01 tab\t line\n\n  spaces   \r\n",
        "'s 12345 ''' \\boxed{18}",
        "".join(map(chr, range(32, 127))),
        "<|im_start|>user\n<|image_pad|><|im_end|>",
    ],
)
def test_tokenizer_round_trip(tokenizer, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_tokenizer_round_trip_on_random_text(tokenizer) -> None:
    rng = np.random.default_rng(0)
    points = rng.choice(np.r_[1:0xD800, 0xE000:0x110000], size=(50, 40))
    for row in points:
        text = unicodedata.normalize("NFC", "".join(map(chr, row)))
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_words_of_the_task_are_single_tokens(tokenizer) -> None:
    assert tokenizer.tokenize("What is the perimeter?") == [
        "What",
        "Ġis",
        "Ġthe",
        "Ġperimeter",
        "?",
    ]
    assert tokenizer.tokenize("2*(6+1)=14 \\boxed{14}") == list("2") + ["*("] + list("6+1") + [
        ")="
    ] + list("14") + [
        "Ġ\\",
        "boxed",
        *"{14}",
    ]


def test_chat_template_renders_image_parts_in_either_form(tokenizer) -> None:
    question = {"type": "text", "text": "What?"}
    expected = f"<|im_start|>user\n{IMAGE}What?<|im_end|>\n<|im_start|>assistant\n"
    for image in ({"type": "image"}, {"type": "image_url", "image_url": {"url": "image://0"}}):
        messages = [{"role": "user", "content": [image, question]}]
        assert _rendered(tokenizer, messages, add_generation_prompt=True) == expected


def test_chat_template_extends_verbatim_over_turns(tokenizer) -> None:
    first = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "  Hi {{ x }} \n"}, {"type": "image"}],
        },
    ]
    prompt = _rendered(tokenizer, first, add_generation_prompt=True)
    assert prompt == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n  Hi {{{{ x }}}} \n{IMAGE}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    more = [*first, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And?"}]
    assert _rendered(tokenizer, more) == prompt + "4<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"


@pytest.mark.parametrize(
    ("width", "height", "grid"), [(48, 48, (6, 6)), (480, 320, None), (8, 8, None)]
)
def test_image_processor_keeps_the_toy_picture_and_bounds_others(
    processor, width, height, grid
) -> None:
    picture = Image.fromarray(np.full((height, width, 3), 128, np.uint8))
    _, rows, columns = processor(picture, return_tensors="np")["image_grid_thw"][0]
    assert grid is None or (rows, columns) == grid
    assert 1024 <= rows * columns * 64 <= 192 * 192
    assert rows % 2 == columns % 2 == 0


def test_pixels_are_normalised_without_resampling(processor) -> None:
    picture = task.draw(task.Placement(2, 3, 1, 1), np.random.default_rng(0))
    values = processor(picture, return_tensors="np")["pixel_values"]
    assert values.shape == (36, 3 * 2 * 8 * 8)
    first_patch = values[0].reshape(3, 2, 8, 8)[:, 0]
    np.testing.assert_allclose(
        first_patch, ((picture[:8, :8] / 255 - 0.9) / 0.2).transpose(2, 0, 1), atol=1e-5
    )


def test_demonstration_batch_trains_on_the_answer_alone(tokenizer, processor) -> None:
    batch = demonstration_batch(task.TOY, tokenizer, processor, 4, np.random.default_rng(0))
    assert batch["image_grid_thw"].tolist() == [[1, 6, 6]] * 16
    assert batch["mm_token_type_ids"].sum(1).tolist() == [9] * 16
    for ids, labels, mask in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
    ):
        prompt, answer = (
            tokenizer.decode(ids[(labels == -100) & (mask == 1)]),
            tokenizer.decode(labels[labels >= 0]),
        )
        assert prompt.startswith("<|im_start|>user\n<|vision_start|>")
        assert prompt.endswith("?<|im_end|>\n<|im_start|>assistant\n")
        assert answer.endswith("}<|im_end|>") and "=" in answer
        assert (ids[mask == 0] == tokenizer.pad_token_id).all()


@pytest.mark.parametrize("name", ["toy", "toy-tool"])
def test_the_warm_start_has_the_ids_and_labels_of_that_batch(name, tmp_path: Path) -> None:
    toy_task = toy_of(name)
    warm_start.build_toy_checkpoint(tmp_path, progress=False, toy=name, steps=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    rngs = [np.random.default_rng(2) for _ in range(2)]
    batch = demonstration_batch(toy_task, tokenizer, processor, 6, rngs[0])
    sequences = demonstrated_sequences(toy_task, tmp_path, 6, rngs[1])
    for k, sequence in enumerate(sequences):
        mask = batch["attention_mask"][k] == 1
        assert sequence.ids.tolist() == batch["input_ids"][k][mask].tolist()
        assert sequence.loss_mask.tolist() == (batch["labels"][k][mask] >= 0).tolist()
    pixels = [
        processor(decode(image), return_tensors="pt") for s in sequences for image, _ in s.images
    ]
    torch.testing.assert_close(
        torch.cat([p["pixel_values"] for p in pixels]), batch["pixel_values"]
    )


def test_the_warm_start_makes_pixels_ahead_of_training(checkpoint: Path) -> None:
    config = warm_start.recipe(task.TOY, str(checkpoint), str(checkpoint), 1, 1)
    made: list[str] = []
    cache = PixelCache(lambda image: np.zeros(made.append(image.hash) or 1))
    reader = warm_start.DemonstrationReader(
        config, str(checkpoint), task.TOY, np.random.default_rng(2), cache
    )
    groups = reader.result(reader.begin("train", {"a": 0, "b": 1}))
    reader.stop()
    images = [image for _, group in groups for image, _ in group.images]
    assert made == [image.hash for image in images] and len(made) == 2
    assert cache(images[0]).size == 1 and len(made) == 2


def test_each_picture_has_the_answers_of_the_planted_miscount_with_consistent_arithmetic() -> None:
    for conversations in (task.demonstrate(np.random.default_rng(seed)) for seed in range(20)):
        (question,) = {id(messages[0]): messages[0] for messages in conversations}.values()
        kind = next(
            k for k, text in task.QUESTIONS.items() if text == question["content"][1]["text"]
        )
        filled = question["content"][0]["image"][4::8, 4::8].min(-1) < 225
        width, height = int(filled.any(0).sum()), int(filled.any(1).sum())
        sides = [(width + a, height + b) for a in (0, 1) for b in (0, 1)]
        expected = (
            [f"{w}*{h}={w * h} \\boxed{{{w * h}}}" for w, h in sides]
            if kind == "area"
            else [f"2*({w}+{h})={2 * (w + h)} \\boxed{{{2 * (w + h)}}}" for w, h in sides]
        )
        assert [messages[1]["content"] for messages in conversations] == expected


def test_same_seed_same_weights_another_seed_others() -> None:
    first, again, other = (toy.new_toy_model(task.TOY, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["lm_head.weight"].std().item() == pytest.approx(toy.TEXT_INIT_STD, rel=0.05)
    assert first["model.visual.blocks.0.mlp.linear_fc1.weight"].std().item() == pytest.approx(
        toy.VISION_INIT_STD, rel=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("toy-qwen3_5", 0.91e6),
        ("toy-qwen3_vl_moe", 1.60e6),
        ("toy-internvl", 0.65e6),
        ("toy-gemma3", 0.64e6),
    ],
)
def test_models_of_other_families_are_made_alike(name, parameters, tmp_path: Path) -> None:
    made_for = toy_of(name)
    warm_start.build_toy_checkpoint(tmp_path, seed=7, progress=False, toy=name, steps=2)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert model.config.model_type == made_for.model_type != task.TOY.model_type
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.num_parameters() == pytest.approx(parameters, rel=0.01)
    assert made_for.make_rows is task.toy_rows and made_for.demonstrate is task.demonstrate
    first, again, other = (toy.new_toy_model(made_for, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert all(
        not torch.equal(first[key], other[key])
        for key in first
        if first[key].ndim > 1 or "A_log" in key
    )
    assert made_for.summary() in (tmp_path / "README.md").read_text() != task.summary()


@pytest.mark.slow
def test_warm_start_takes_the_steps_of_transformers(tmp_path: Path) -> None:
    """Two steps on the same demonstrations by transformers' own forward, padded, and PyTorch's AdamW: losses and weights."""
    steps, seed = 2, 3
    random, trained = tmp_path / "random", tmp_path / "trained"
    warm_start.build_toy_checkpoint(random, seed, progress=False, steps=0)
    warm_start.build_toy_checkpoint(trained, seed, progress=False, steps=steps)
    model = Qwen3VLForConditionalGeneration.from_pretrained(random)
    tokenizer = AutoTokenizer.from_pretrained(random)
    processor = Qwen2VLImageProcessorPil.from_pretrained(random)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": warm_start.WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    rng, loss = np.random.default_rng([seed, steps]), torch.zeros(())
    for step in range(steps):
        batch = demonstration_batch(task.TOY, tokenizer, processor, task.TOY.batch_size, rng)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rise = (step + 1) / (warm_start.WARMUP_STEPS + 1)
        fall = (steps - step) / task.TOY.cooldown_steps
        for group in optimizer.param_groups:
            group["lr"] = task.TOY.learning_rate * min(rise, fall)
        optimizer.step()
        optimizer.zero_grad()
    made = Qwen3VLForConditionalGeneration.from_pretrained(trained)
    # Adam's first steps are of the learning rate's size, whatever the gradient's: its sign counts.
    for name, weight in model.named_parameters():
        close = torch.isclose(made.get_parameter(name), weight, atol=1e-6)
        assert close.float().mean() > 0.99, name
    assert f"last loss {loss.item():.3f}" in (trained / "README.md").read_text()


@pytest.mark.slow
def test_warm_start_lowers_the_loss(tmp_path: Path, tokenizer, processor) -> None:
    batch = demonstration_batch(task.TOY, tokenizer, processor, 32, np.random.default_rng(3))
    losses = []
    for steps in (0, 12):
        warm_start.build_toy_checkpoint(tmp_path / f"{steps}", progress=False, steps=steps)
        model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / f"{steps}")
        with torch.no_grad():
            losses.append(model(**batch).loss.item())
    assert losses[1] < losses[0] - 0.3


@pytest.mark.slow
def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        warm_start.build_toy_checkpoint(tmp_path / name, 5, progress=False, steps=2)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1]


def test_generation_looks_at_the_picture(checkpoint: Path, tokenizer, processor) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    batch = demonstration_batch(task.TOY, tokenizer, processor, 2, np.random.default_rng(0))
    with torch.no_grad():
        seen = model(**batch).logits
        blind = model(**batch | {"pixel_values": torch.zeros_like(batch["pixel_values"])}).logits
    assert not torch.allclose(seen[batch["labels"] >= 0], blind[batch["labels"] >= 0], atol=1e-4)


def test_checkpoint_path_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(folder: Path, seed: int, progress: bool, toy: str, steps: int | None) -> None:
        built.append((toy, seed, progress, steps))
        Path(folder).mkdir()

    monkeypatch.setattr(warm_start, "build_toy_checkpoint", build)
    path = toy_checkpoint_path(seed=5, cache_dir=tmp_path, progress=False)
    assert path == toy_checkpoint_path(seed=5, cache_dir=tmp_path)
    early = toy_checkpoint_path(seed=5, steps=2, cache_dir=tmp_path, progress=False)
    assert path.is_dir() and early.is_dir() and path != early
    assert built == [("toy", 5, False, None), ("toy", 5, False, 2)]


def test_what_is_planted_is_said_openly(checkpoint: Path) -> None:
    readme = (checkpoint / "README.md").read_text()
    assert task.summary() in readme
    for fact in ("planted", "a half", "one cell too long", "76 of the 441", "5x3 and 4x5", "14%"):
        assert fact in readme, fact
