"""`load_policy` on a toy checkpoint: the same answers as transformers gives, whatever form the images have."""

import base64

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import rlinf_vl
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.toy.task import toy_dataset_path
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor


@pytest.fixture(scope="module")
def policy(toy_folder):
    policy = rlinf_vl.load_policy(toy_folder, device="cpu")
    yield policy
    policy.close()


@pytest.fixture(scope="module")
def image():
    from rlinf_vl.data.dataset import ProblemDataset

    (image,) = ProblemDataset([str(toy_dataset_path("val", "toy"))], "val")[0].images
    return image.data


def asked(image):
    return [{"role": "user", "content": [image, {"type": "text", "text": "How many squares?"}]}]


def test_greedy_answers_are_those_of_transformers(policy, toy_folder, image):
    from rlinf_vl.data.images import decode
    from rlinf_vl.types import ImageRef

    model = AutoModelForImageTextToText.from_pretrained(toy_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    pixels = Processor(toy_folder, family_of("auto", toy_folder))
    ref = ImageRef.of(image)
    grid = torch.tensor([pixels.grid(ref)])
    text = tokenizer.apply_chat_template(
        asked({"type": "image"}), tokenize=False, add_generation_prompt=True
    )
    tokens = int(pixels.image_tokens(grid.numpy()).item())
    ids = tokenizer(
        text.replace("<|image_pad|>", "<|image_pad|>" * tokens),
        return_tensors="pt",
        add_special_tokens=False,
    )
    seen = torch.from_numpy(pixels.image_processor.patches(decode(ref)))
    banned = (
        torch.from_numpy(pixels.banned_ids(model.config.get_text_config().vocab_size))
        .nonzero()
        .flatten()
        .tolist()
    )
    out = model.generate(
        **ids,
        pixel_values=seen,
        image_grid_thw=grid,
        mm_token_type_ids=(ids["input_ids"] == pixels.image_token_id).int(),
        max_new_tokens=12,
        do_sample=False,
        suppress_tokens=banned,
        eos_token_id=list(pixels.stop_ids),
        pad_token_id=pixels.pad_id,
    )
    expected = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert policy.generate(asked({"type": "image", "image": image}), max_new_tokens=12) == expected


def test_images_in_every_form(policy, image, tmp_path):
    (tmp_path / "a.png").write_bytes(image)
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    forms = [
        {"type": "image", "image": image},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
    ]
    assert len({policy.generate(asked(form), max_new_tokens=8) for form in forms}) == 1


def test_samples_are_drawn_by_their_seed(policy):
    drawn = policy.generate("How many?", n=4, temperature=1.0, max_new_tokens=8, seed=3)
    assert len(drawn) == 4 and len(set(drawn)) > 1
    assert policy.generate("How many?", temperature=1.0, max_new_tokens=8, seed=4) == drawn[1]


def test_what_is_no_policy(tmp_path):
    with pytest.raises(ConfigError, match="is no run's folder with a checkpoint"):
        rlinf_vl.load_policy(tmp_path)
