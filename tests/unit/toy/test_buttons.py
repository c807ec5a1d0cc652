"""The buttons: pages and their texts, the split, the demonstrations and the ids that the warm start sees. No browser."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from demonstration_batch import demonstrated_sequences

from rlinf_vl.config.toys import TOYS
from rlinf_vl.extras.toy import buttons
from rlinf_vl.extras.toy.buttons import Page
from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.observation import observe
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Problem

TEXT = "red00 green13 blue32"


def read(picture: np.ndarray) -> str:
    """Return the page that a picture shows, from the middles of its cells."""
    assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
    cells = {}
    for row, column in itertools.product(range(4), repeat=2):
        pixel = tuple(map(int, picture[16 * row + 8, 16 * column + 8]))
        cells[pixel] = f"{row}{column}"
    return " ".join(name + cells[rgb] for name, rgb in buttons.COLOURS.items())


def test_a_page_has_a_text_and_a_picture() -> None:
    page = Page.of_text(TEXT)
    assert page.cells == {"red": (0, 0), "green": (1, 3), "blue": (3, 2)} and str(page) == TEXT
    assert read(page.picture()) == TEXT
    ground = (page.picture() == buttons.GROUND).all(axis=-1)
    assert ground.sum() == 64 * 64 - 3 * 16 * 16
    answer = page.answer("green")
    assert answer.startswith(" red00 green13 blue32: green13<tool_call>{")
    call = json.loads(answer.partition("<tool_call>")[2].removesuffix("</tool_call>"))
    assert call == {"name": "click", "arguments": {"x": 56, "y": 24}}


@pytest.mark.parametrize("text", ["", "red00", "green13 red00 blue32", TEXT + " red11", "red0 0"])
def test_a_text_that_is_no_page_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must name red, green, blue"):
        Page.of_text(text)


def test_no_layout_is_on_both_sides_of_the_split() -> None:
    layouts = {}
    for split in ("train", "val"):
        rows = buttons.make_rows(split)
        assert len({row["pages"] for row in rows}) == len(rows) == TOYS["toy-browser"].rows[split]
        assert all(tuple(row) == TOYS["toy-browser"].columns for row in rows)
        pages = [Page.of_text(text) for row in rows for text in row["pages"].split("/")]
        layouts[split] = {frozenset(page.cells.values()) for page in pages}
        asked = Counter(name for row in rows for name in row["answer"].split(" "))
        assert asked.keys() == {"red", "green", "blue"}
        assert min(asked.values()) > asked.total() / 4
        for row in rows:
            assert row["problem"] == f"Click {row['answer'].split(' ')[0]}"
    assert not layouts["train"] & layouts["val"]
    every = list(itertools.combinations(itertools.product(range(4), repeat=2), 3))
    assert sum(map(buttons.held_out, every)) / len(every) == pytest.approx(1 / 8, abs=0.04)


def test_demonstrations_name_what_they_see_and_err_as_often_as_is_said() -> None:
    rng = np.random.default_rng(0)
    wrong_clicks: Counter[bool] = Counter()
    for _ in range(400):
        (messages,) = buttons.demonstrate(rng)
        assert len(messages) in (2, 4)
        for number, (seen, answer) in enumerate(zip(messages[::2], messages[1::2], strict=True)):
            parts = {part["type"]: part for part in seen["content"]}
            page = Page.of_text(read(parts["image"]["image"]))
            assert not buttons.held_out(page.cells.values())
            asked = parts["text"]["text"].removeprefix("Click ")
            clicked = next(name for name in page.cells if page.answer(name) == answer["content"])
            wrong_clicks[clicked != asked] += 1
            # A wrong click is the last one.
            assert (clicked == asked) == (number == 0 and len(messages) == 4) or number == 1
    share = wrong_clicks[True] / wrong_clicks.total()
    assert share == pytest.approx(buttons.MISTAKE_PROBABILITY, abs=0.05)


def test_the_warm_start_sees_the_ids_that_an_episode_has(tmp_path) -> None:
    build_toy_checkpoint(tmp_path, progress=False, toy="toy-browser", steps=0)
    processor = Processor(tmp_path, family_of("qwen3_vl"))
    renderer, tokenizer = Renderer(processor), processor.tokenizer
    rng = np.random.default_rng(5)
    lengths = set()
    for sequence in demonstrated_sequences(buttons.TOY, tmp_path, 4, np.random.default_rng(5)):
        (messages,) = buttons.demonstrate(rng)
        problem = Problem("b", (), "")
        first, *later = [observe((message,), problem) for message in messages[::2]]
        answers = []
        for message in messages[1::2]:
            answer_ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            answers.append(np.array(answer_ids + list(processor.stop_ids)[:1]))
        prompt, _ = renderer.prompt(first.messages, first.images)
        expected = np.concatenate([prompt, answers[0]])
        if later:
            prompt, _ = renderer.follow(expected, first, [(answers[0], later[0])])
            expected = np.concatenate([prompt, answers[1]])
        assert sequence.ids.tolist() == expected.tolist()
        assert sequence.loss_mask.sum() == sum(map(len, answers))
        lengths.add(len(answers))
    assert lengths == {1, 2}
