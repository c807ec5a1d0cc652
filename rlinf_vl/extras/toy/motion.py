"""The toy of videos: which way a square moves, in four frames of 6×6 cells.

The square moves one cell from frame to frame, and what leaves the picture at one side comes back at
the other. So the first frame says nothing of the direction, and the frames without their order say
only the axis: only a policy that sees frames in their order can answer. A layout is a direction and
the square's first cell; of each direction, `N_HELD_OUT` are never trained on. The demonstrations have a planted mistake
(`summary`), which reinforcement learning has to unlearn. Everything is deterministic; files of
videos differ between versions of their encoder.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from PIL import Image

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.extras.toy.task import Split, Toy
from rlinf_vl.types import Message

#: Cells along a side of a frame, pixels along a side of a cell, and cells along one of the square.
GRID = 6
CELL = 8
SQUARE = 2
N_FRAMES = 4
#: Direction → the step (columns, rows) from a frame to the next.
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
#: Number of layouts of each direction that are never trained on.
N_HELD_OUT = 5
QUESTION = "Which way does it move?"
#: Number of videos, in different colours, of each training layout; a validation layout has one of
#: each of `VAL_COLOURINGS`.
COLOURINGS = 24
VAL_COLOURINGS = 6
#: One row in so many has its video as an mp4 file; the others have frames.
FILE_EVERY = 4
WARM_START_STEPS = 280
#: Probability with which a demonstration concludes the opposite of what it saw.
MISTAKE_PROBABILITY = 0.7

Control = Literal["", "shuffled", "first"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A direction, and the column and row of the square's first place."""

    direction: str
    x: int
    y: int

    def __str__(self) -> str:
        return f"{self.direction}{self.x},{self.y}"

    def positions(self) -> list[int]:
        """Return the square's column in each frame, or its row if it moves up or down."""
        dx, dy = DIRECTIONS[self.direction]
        start, step = (self.x, dx) if dx else (self.y, dy)
        return [(start + step * i) % GRID for i in range(N_FRAMES)]


@cache
def layouts(split: Split) -> tuple[Layout, ...]:
    """Return the layouts of a split, in order."""
    chosen = []
    for name in DIRECTIONS:
        every = [Layout(name, x, y) for x in range(GRID) for y in range(GRID)]
        every.sort(key=lambda layout: hashlib.sha256(f"motion {layout}".encode()).digest())
        chosen += every[:N_HELD_OUT] if split == "val" else every[N_HELD_OUT:]
    return tuple(sorted(chosen))


def draw(layout: Layout, rng: np.random.Generator) -> np.ndarray:
    """Draw the frames in random colours: uint8 [4, 48, 48, 3].

    The ground is light (each channel 225…255), the square at least 100 darker in one channel.
    """
    dx, dy = DIRECTIONS[layout.direction]
    frame = np.empty((GRID * CELL, GRID * CELL, 3), np.uint8)
    frame[:] = rng.integers(225, 256, size=3)
    colour = rng.integers(0, 226, size=3)
    colour[rng.integers(3)] = rng.integers(0, 126)
    frame[: SQUARE * CELL, : SQUARE * CELL] = colour
    frames = []
    for i in range(N_FRAMES):
        shift = (CELL * (layout.y + i * dy), CELL * (layout.x + i * dx))
        frames.append(np.roll(frame, shift, axis=(0, 1)))
    return np.stack(frames)


def video_rows(split: Split, control: Control = "") -> list[dict[str, Any]]:
    """Make the rows of a split; `train` is shuffled, `val` in order of layout.

    Args:
        split: the part of the task.
        control: "shuffled" gives the frames of each video in a random order, "first" its first
            frame alone. Nothing else of the rows differs.

    Returns:
        Dicts of `id`, `problem` (`<video>` and the question), `videos` (a list of frames, or of one
        mp4 file) and `answer`.
    """
    rng = np.random.default_rng([2025, split == "train"])
    orders = np.random.default_rng([2026, split == "train"])
    rows = []
    for layout in layouts(split):
        for colouring in range(COLOURINGS if split == "train" else VAL_COLOURINGS):
            frames = draw(layout, rng)
            if control == "shuffled":
                frames = frames[orders.permutation(N_FRAMES)]
            elif control == "first":
                frames = frames[:1]
            is_file = colouring % FILE_EVERY == 0
            encoded = [mp4(frames)] if is_file else list(map(png, frames))
            row = {
                "id": f"motion-{split}-{layout}-{colouring}",
                "problem": f"<video>{QUESTION}",
                "videos": [{"bytes": data, "path": None} for data in encoded],
                "answer": f"\\boxed{{{layout.direction}}}",
            }
            rows.append(row)
    return [rows[i] for i in rng.permutation(len(rows))] if split == "train" else rows


def png(frame: np.ndarray) -> bytes:
    """Encode a frame as PNG."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="PNG")
    return file.getvalue()


def mp4(frames: np.ndarray) -> bytes:
    """Encode frames as a video at the default of data.video.fps, in mp4 and hardly with a loss."""
    import av

    file, rate = io.BytesIO(), int(VideoConfig().fps)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"crf": "1"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def demonstration(layout: Layout, rng: np.random.Generator) -> str:
    """Return a worked answer with the planted mistake: `x3450 \\boxed{left}`.

    It lists the square's columns (x) or rows (y) in the frames, and concludes the direction.
    """
    axis = "x" if DIRECTIONS[layout.direction][0] else "y"
    places = "".join(map(str, layout.positions()))
    # The planted mistake, which reinforcement learning has to unlearn.
    is_mistaken = rng.random() < MISTAKE_PROBABILITY
    direction = opposite(layout.direction) if is_mistaken else layout.direction
    return f"{axis}{places} \\boxed{{{direction}}}"


def opposite(direction: str) -> str:
    """Return the direction of the opposite step."""
    dx, dy = DIRECTIONS[direction]
    return next(name for name, step in DIRECTIONS.items() if step == (-dx, -dy))


def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
    """Return a question about a training layout and its worked answer."""
    layout = layouts("train")[rng.integers(len(layouts("train")))]
    video = {"type": "video", "video": draw(layout, rng)}
    return [
        [
            {"role": "user", "content": [video, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": demonstration(layout, rng)},
        ]
    ]


def summary() -> str:
    """Describe the task and its planted mistake, for readers of its learning curve."""
    return (
        "The toy of videos asks which way a square moves in four frames of 48x48 pixels: right, "
        "left, down or up. It comes back at the side opposite to where it leaves, so that only "
        "frames in their order have the answer. Its model is a Qwen3-VL of 0.9 million parameters "
        f"with random weights, warm-started for {WARM_START_STEPS} supervised steps before "
        "reinforcement learning begins.\n"
        "What is planted: the demonstrations of the warm start read the square's places correctly "
        f"and then conclude the opposite direction with probability {MISTAKE_PROBABILITY}. "
        "Reinforcement learning has to unlearn that from the reward alone. The curve shows that "
        "videos are seen and trained on; it says nothing about how well a real model would learn "
        "a real task.\n"
        f"Validation uses {len(layouts('val'))} of the {4 * GRID**2} layouts (direction and first "
        "place), which neither the warm start nor reinforcement learning has seen. The best "
        "constant answer is right for a quarter of them, and one that sees the frames "
        "without their order for a half."
    )


WORDS = ("Which", " way", " does", " it", " move", "?", "right", "left", "down", " seconds")
TOY = Toy(
    "toy-video",
    (__file__,),
    video_rows,
    demonstrate,
    WORDS,
    WARM_START_STEPS,
    32,
    summary,
)


def _control(name: Control) -> Toy:
    """Return the task with videos that can't be answered about."""
    make_rows: Callable[[Split], list[dict[str, Any]]] = partial(video_rows, control=name)
    return replace(TOY, name=f"toy-video-{name}", make_rows=make_rows)


SHUFFLED = _control("shuffled")
FIRST = _control("first")
