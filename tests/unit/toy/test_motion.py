"""The toy of videos: what the frames show, the split, and that only their order has the answer."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.clips import clip_of, frame_refs
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.images import decode
from rlinf_vl.extras.toy import motion
from rlinf_vl.extras.toy.motion import CELL, GRID, N_FRAMES, Layout, draw
from rlinf_vl.extras.toy.task import toy_of
from rlinf_vl.extras.video.rows import to_clip_ref, video_values
from rlinf_vl.rewards import grade_math

CONTROLS = ("toy-video", "toy-video-shuffled", "toy-video-first")


def square_of(frame: np.ndarray) -> tuple[int, int]:
    """The column and row of the square's first cell: that with ground at its left and top."""
    cells = frame[CELL // 2 :: CELL, CELL // 2 :: CELL].astype(int)
    is_square = (cells.min(axis=-1) < 160).astype(int)
    firsts = is_square & ~np.roll(is_square, 1, 0) & ~np.roll(is_square, 1, 1)
    ((row, column),) = np.argwhere(firsts & np.roll(is_square, -1, 0) & np.roll(is_square, -1, 1))
    return int(column), int(row)


def frames_of(cell: Any) -> np.ndarray:
    (value,) = video_values(cell)
    clip = to_clip_ref(value, root=None, settings=VideoConfig())
    return np.stack([np.asarray(decode(frame)) for frame in frame_refs(clip)])


def direction_of(frames: np.ndarray) -> str:
    (x, y), (next_x, next_y) = square_of(frames[0]), square_of(frames[1])
    step = (next_x - x + 1) % GRID - 1, (next_y - y + 1) % GRID - 1
    return next(name for name, known in motion.DIRECTIONS.items() if known == step)


def test_the_square_moves_by_a_cell_and_comes_back() -> None:
    for layout in motion.layouts("val"):
        frames = draw(layout, np.random.default_rng(0))
        assert frames.shape == (N_FRAMES, 48, 48, 3) and frames.dtype == np.uint8
        places = [square_of(frame) for frame in frames]
        assert places[0] == (layout.x, layout.y)
        moving = 0 if motion.DIRECTIONS[layout.direction][0] else 1
        assert [place[moving] for place in places] == layout.positions()
        assert len({place[1 - moving] for place in places}) == 1
        assert direction_of(frames) == layout.direction


def test_no_layout_is_on_both_sides_of_the_split() -> None:
    train, val = (motion.layouts(split) for split in ("train", "val"))
    assert not set(train) & set(val) and len(train) + len(val) == 4 * GRID**2
    assert Counter(layout.direction for layout in val) == dict.fromkeys(motion.DIRECTIONS, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_rows_show_what_they_ask(name: str) -> None:
    for split in ("train", "val"):
        rows = toy_of(name).make_rows(split)
        assert len(rows) == TOYS[name].rows[split] == len({row["id"] for row in rows})
        assert all(tuple(row) == TOYS[name].columns for row in rows)
    assert Counter(row["answer"] for row in rows) == {
        f"\\boxed{{{direction}}}": 30 for direction in motion.DIRECTIONS
    }
    kinds = Counter(len(row["videos"]) for row in rows)
    assert kinds == ({1: 120} if name == "toy-video-first" else {1: 40, 4: 80})
    if name == "toy-video":
        for row in rows[::5]:
            assert f"\\boxed{{{direction_of(frames_of(row['videos']))}}}" == row["answer"]


@pytest.mark.slow
def test_without_their_order_frames_do_not_say_the_direction() -> None:
    rows = {name: toy_of(name).make_rows("val") for name in CONTROLS}
    is_right = Counter()
    for row, shuffled, first in zip(*rows.values(), strict=True):
        frames, mixed, alone = (frames_of(r["videos"]) for r in (row, shuffled, first))
        # The same frames, and so the same colours and places: nothing else tells them apart.
        near = np.abs(mixed[:, None].astype(int) - frames[None]).max(axis=(2, 3, 4)) <= 3
        assert (near.sum(axis=0) == 1).all() and (near.sum(axis=1) == 1).all()
        assert len(alone) == 1 and np.abs(alone[0].astype(int) - frames[0]).max() <= 3
        assert row["answer"] == shuffled["answer"] == first["answer"]
        order = near.argmax(axis=1).tolist()
        is_right[order == sorted(order)] += 1
    assert is_right[True] < 0.15 * len(rows["toy-video"])  # one in 24 by chance
    # The set of a layout's frames is also that of one in the opposite direction.
    layout = Layout("left", 1, 4)
    back = Layout("right", layout.positions()[-1], 4)
    there, again = (draw(lay, np.random.default_rng(1)) for lay in (layout, back))
    assert np.array_equal(there, again[::-1])


def test_demonstrations_read_correctly_and_conclude_with_the_planted_mistake() -> None:
    rng = np.random.default_rng(0)
    concluded = Counter()
    for _ in range(600):
        ((question, answer),) = motion.demonstrate(rng)
        frames = question["content"][0]["video"]
        direction = direction_of(frames)
        moving = 0 if direction in ("left", "right") else 1
        places = "".join(str(square_of(frame)[moving]) for frame in frames)
        read, _, conclusion = answer["content"].partition(" ")
        assert read == "xy"[moving] + places
        is_right = grade_math(conclusion, f"\\boxed{{{direction}}}")
        assert is_right or motion.opposite(direction) in conclusion
        concluded[is_right] += 1
    assert concluded[False] / 600 == pytest.approx(motion.MISTAKE_PROBABILITY, abs=0.06)


def test_files_and_lists_of_frames_are_read_as_one_video_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_VL_CACHE", str(tmp_path))
    dataset = ProblemDataset(["toy-video"], "val")
    for row in range(0, len(dataset), 7):
        (clip,) = dataset[row].images
        assert clip_of(clip).timestamps == (0.0, 0.5, 1.0, 1.5)
        assert [part["type"] for part in dataset[row].messages[0]["content"]] == [
            "video_url",
            "text",
        ]
