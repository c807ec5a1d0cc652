"""The path "prompts" of `prove-family`: conversations of whole folders against transformers' own processors, and planted faults."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny_tiles import write_idefics3, write_internvl

from rlinf_vl.__main__ import main
from rlinf_vl.models.families import family_of
from rlinf_vl.models.image_processor import QwenImages
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.tiles import TileImages
from rlinf_vl.rollout.episode import renderer
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.verify.prove.prompts import prompt_figures

#: A template with everything that a checkpoint's may have; LLaVA's and InternVL's know images as this one does.
TEMPLATE = """\
{%- if tools -%}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, toy_folder):
    folder = tmp_path_factory.mktemp("prompts")
    shutil.copytree(toy_folder, folder / "qwen3_vl")
    (folder / "qwen3_vl" / "chat_template.jinja").write_text(TEMPLATE)
    written = {"qwen3_vl": folder / "qwen3_vl", "toy": toy_folder}
    for name, write in (("internvl", write_internvl), ("idefics3", write_idefics3)):
        written[name] = write(folder / name)
    return written


@pytest.mark.parametrize("name", ["qwen3_vl", "toy", "internvl", "idefics3"])
def test_prompts_are_proven(name, folders, capsys):
    assert main(["prove-family", str(folders[name]), "--paths", "prompts,positions"]) == 0
    assert "0.0e+00 / 0.0e+00 / 0.0e+00" in capsys.readouterr().out


def test_a_model_type_has_no_prompts(capsys):
    assert main(["prove-family", "qwen3", "--paths", "prompts"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "refused: no tokenizer in a model" in out and "give a folder" in out


def test_a_tokenizer_without_a_template_is_refused(folders, tmp_path, capsys):
    shutil.copytree(folders["toy"], tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    assert main(["prove-family", str(tmp_path / "copy"), "--paths", "prompts"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "the tokenizer has no chat template" in out


# --- planted faults ---------------------------------------------------------------------------------------------------


class WrongCounts(QwenImages):
    def image_tokens(self, placeholder_id: int) -> ImageTokens:
        return ImageTokens(placeholder_id, self._merge_size // 2)


class LargerBound(QwenImages):
    """Forgets the checkpoint's bound of an image's area."""

    def __init__(self, path, min_pixels=None, max_pixels=None) -> None:
        super().__init__(path, min_pixels, 4 * 192 * 192)


class Unnormalized(QwenImages):
    def patches(self, image):
        self._processor.image_mean = [0.5] * 3
        return super().patches(image)


class WithoutMarks(TileImages):
    def ids(self, height, width, placeholder_id):
        ids = super().ids(height, width, placeholder_id)
        return ids[ids == placeholder_id]


class ForAnySize(TileImages):
    """Takes the marks of rows and columns from an image that is as wide as it is high."""

    def ids(self, height, width, placeholder_id):
        return super().ids(max(height, width), max(height, width), placeholder_id)


class ReversedTiles(TileImages):
    def patches(self, image):
        return super().patches(image)[::-1]


#: Fault → (folder, image processor, places of the figures that show it: ids, placeholders, pixels).
FAULTS = {
    "placeholder count": ("qwen3_vl", WrongCounts, (0, 1)),
    "bound of an image's area": ("toy", LargerBound, None),
    "mean of colours": ("qwen3_vl", Unnormalized, (2,)),
    "no marks around tiles": ("internvl", WithoutMarks, (0,)),
    "marks of another shape": ("idefics3", ForAnySize, (0, 1)),
    "tiles in another order": ("idefics3", ReversedTiles, (2,)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, folders):
    name, processor, places = FAULTS[fault]
    family = replace(family_of("auto", folders[name]), image_processor=processor)
    if places is None:
        with pytest.raises(ValueError, match="patches or tiles, but transformers cuts"):
            prompt_figures(family, folders[name])
        return
    figures = np.array(prompt_figures(family, folders[name]))
    assert np.flatnonzero(figures > 1e-5).tolist() == list(places)


def without_options(self, messages, tools=(), **options):
    self._options = {}
    return SOUND(self, messages, tools, **options)


def without_tools(self, messages, tools=(), **options):
    return SOUND(self, messages, tools and [{"type": "function", "function": {}}], **options)


def without_system(self, messages, tools=(), **options):
    without = [message for message in messages if message["role"] != "system"]
    return SOUND(self, without, tools, **options)


def trimmed(self, messages, tools=(), **options):
    return SOUND(self, messages, tools, **options).replace("  ", " ")


SOUND = Renderer._apply_template


@pytest.mark.parametrize("fault", [without_options, without_tools, without_system, trimmed])
def test_what_a_renderer_loses_is_found(fault, folders, monkeypatch):
    family = family_of("auto", folders["qwen3_vl"])
    monkeypatch.setattr(Renderer, "_apply_template", fault)
    ids, placeholders, pixels = prompt_figures(family, folders["qwen3_vl"])
    assert ids > 0 and placeholders == pixels == 0


def test_pictures_in_another_order_are_found(folders, monkeypatch):
    sound = renderer.expand_images

    def reversed_pictures(processor, ids, images):
        return sound(processor, ids, list(images)[::-1])

    monkeypatch.setattr(renderer, "expand_images", reversed_pictures)
    folder = folders["internvl"]
    ids, placeholders, pixels = prompt_figures(family_of("auto", folder), folder)
    assert ids > 0 and placeholders == pixels == 0
