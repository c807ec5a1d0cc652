"""Conversations to imitate: rows → groups of one trajectory, in the form of sampled ones.

The tokens that a trajectory calls sampled are those of the imitated answers, each with the token
that ends its turn. They have no logprobs of an engine, and the version -1.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult, open_datasets
from rlinf_vl.data.unusable import PROMPT_UNUSABLE, BadRow, RowError, kind_and_reason
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import ConfigError
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.row_check import processor_of, renderer_of
from rlinf_vl.types import Group, ImageRef, Message, Problem, TokenSequence, Trajectory, Turn

log = logging.getLogger(__name__)

#: The parts of an answer that may be imitated (`data.imitate`).
ANSWER_PARTS = ("content", "thoughts", "calls")
#: Number of rows that are tried before a run, spread evenly over the data set.
TRIED_ROWS = 64


class Demonstrations:
    """The conversations of a run's data.

    Attributes:
        datasets: split ("train", "val" if it has paths) → its rows.
        placeholder_ids: the ids of image placeholders.
    """

    def __init__(self, config: Config, model_path: str) -> None:
        """Open the data, and load tokenizer and image processor.

        Raises:
            ConfigError: the data can't be opened.
        """
        processor = processor_of(config, model_path)
        self.placeholder_ids = processor.placeholder_ids
        self._renderer = renderer_of(config, processor)
        self._data = config.data
        self._imitate = tuple(config.data.imitate)
        self._max_tokens = config.runner.seq_length
        try:
            self.datasets = open_datasets(config.data, ENVIRONMENTS)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def group(self, split: str, row: int, name: str) -> Group:
        """Return the conversation of a row, as the group of this name.

        Raises:
            RowError: the row can't be read or rendered.
        """
        return imitated_group(self._renderer, [self.datasets[split][row]], name, self._imitate)

    def groups(self, split: str, rows: Mapping[str, int]) -> Iterator[Group | BadRow]:
        """Yield the conversation of each row, by the name of its group; for one that can't be read
        any more, its record."""
        for name, row in rows.items():
            try:
                yield self.group(split, row, name)
            # Readers and tokenizers raise errors of many types; a file may be gone since the check.
            except Exception as error:
                kind, reason = kind_and_reason(error)
                yield BadRow(kind, self.datasets[split].row_id(row), reason)

    def check(
        self,
        split: str,
        rows: Sequence[int],
        see: Callable[[int, Problem, int], None] = lambda *row: None,
    ) -> FilterResult:
        """Check which rows can be imitated: those that can be rendered, in at most
        runner.seq_length tokens.

        Args:
            see: called with (row, problem, tokens) for each row that can be rendered.
        """

        def length(row: int, problem: Problem) -> int:
            n_tokens = len(
                imitated_trajectory(self._renderer, problem, self._imitate).sequences[0].ids
            )
            see(row, problem, n_tokens)
            return n_tokens

        return self.datasets[split].filter_by_length(
            rows,
            length,
            self._max_tokens,
            image_only=self._data.image_only_mode,
            level_key=self._data.curriculum_key,
        )


class Encoder(Protocol):
    """A `Renderer`, as far as conversations without tools go."""

    def conversation(
        self, messages: Sequence[Message], images: Sequence[ImageRef], imitated: Sequence[int]
    ) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]: ...


def imitated_group(
    renderer: Encoder,
    problems: Sequence[Problem],
    name: str,
    parts: Sequence[str] = ANSWER_PARTS,
) -> Group:
    """Return problems whose messages are whole conversations as the group of this name.

    Several problems have the same messages up to the first that is imitated: training computes
    those once. `parts`: `data.imitate`.

    Raises:
        RowError: the chat template does not render one of them.
    """
    first = problems[0]
    trajectories = tuple(imitated_trajectory(renderer, problem, parts) for problem in problems)
    prompt = trajectories[0].turns[0].start
    return Group(name, first.id, prompt, trajectories, first.answer, labels=first.labels)


def imitated_trajectory(
    renderer: Encoder, problem: Problem, parts: Sequence[str] = ANSWER_PARTS
) -> Trajectory:
    """Return a problem whose messages are a whole conversation as a trajectory.

    `parts`: `data.imitate`.

    Raises:
        RowError: the chat template does not render it, or it has none of these parts.
    """
    imitated = [i for i, message in enumerate(problem.messages) if message.get("weight")]
    # Nothing is learned from what comes after the last answer to imitate.
    messages = [_plain(message) for message in problem.messages[: imitated[-1] + 1]]
    n_images = sum(
        part["type"] in ("image_url", "video_url")
        for message in messages
        if message["role"] != "assistant"
        for part in message["content"]
    )
    images = problem.images[:n_images]
    try:
        if isinstance(renderer, Renderer):
            ids, spans, grids = renderer.conversation(messages, images, imitated, problem.tools)
        else:
            ids, spans, grids = renderer.conversation(messages, images, imitated)
    except ValueError as error:
        raise RowError(problem.id, PROMPT_UNUSABLE, str(error)) from error
    mask = np.zeros(len(ids), bool)
    turns = []
    for start, end in spans:
        mask[start:end] = True
        if isinstance(renderer, Renderer) and not set(parts) >= set(ANSWER_PARTS):
            mask[start:end] = _part_mask(renderer, ids[start:end], problem, parts)
        turns.append(Turn(0, start, end, "stop", 0.0))
    if not mask.any():
        named = " and no ".join(parts)
        raise RowError(
            problem.id, PROMPT_UNUSABLE, f"data.imitate: the answers to imitate have no {named}"
        )
    image_grids = [(t, h, w) for t, h, w in grids.tolist()]
    sequence = TokenSequence(
        ids,
        mask,
        logprobs=None,
        versions=np.full(len(ids), -1, np.int32),
        images=tuple(zip(images, image_grids, strict=True)),
    )
    return Trajectory((sequence,), tuple(turns), 0.0, {}, "stop")


def _part_mask(
    renderer: Renderer, answer: np.ndarray, problem: Problem, parts: Sequence[str]
) -> np.ndarray:
    """Return which tokens of an answer are of the parts to imitate, bool [R].

    The token that ends the turn is of the last part that the answer has.
    """
    mask = np.zeros(len(answer), bool)
    content_start, call_start = renderer.part_ends(answer, problem.tools)
    has_calls = call_start < len(answer)
    mask[:content_start] = "thoughts" in parts
    mask[content_start:call_start] = "content" in parts
    mask[call_start:] = has_calls and "calls" in parts
    return mask


def _plain(message: Message) -> Message:
    """Return a message as the chat template gets it: the assistant's with a text as content."""
    plain = {key: value for key, value in message.items() if key != "weight"}
    if message["role"] == "assistant":
        plain["content"] = "".join(part["text"] for part in message["content"])
    return plain


def try_rows(config: Config, model_path: str) -> str:
    """Read and render some rows of the training data; returns the line that says the run is ready.

    Raises:
        ConfigError: none of them can be imitated.
    """
    demonstrations = Demonstrations(config, model_path)
    n_rows = len(demonstrations.datasets["train"])
    rows = range(0, n_rows, max(1, n_rows // TRIED_ROWS))[:TRIED_ROWS]
    result = demonstrations.check("train", rows)
    if not result.kept:
        reasons = [f"row {row.id}: {row.reason}" for row in list(result.bad.values())[:1]]
        if result.too_long:
            reasons.append(
                f"{len(result.too_long)} have {min(result.too_long.values())} tokens or more, "
                f"above runner.seq_length={config.runner.seq_length}: raise that"
            )
        if result.text_only:
            reasons.append(
                f"{len(result.text_only)} have no image, and data.image_only_mode is true"
            )
        raise ConfigError(
            f"data.train_data_paths: none of {len(rows)} rows can be imitated; {'; '.join(reasons)}"
        )
    return f"ready: {n_rows} rows, of {len(rows)} tried {len(result.kept)} can be imitated"
