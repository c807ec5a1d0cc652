"""Trajectories on disk: prompts, answers and rewards, with the rollout's and the trainer's logprobs
of every token.

`trajectories/step_N.parquet` has one row a trajectory (`SCHEMA`), `images/` each image once, by
content.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tokenizers import Tokenizer

from rlinf_vl.data.clips import is_clip
from rlinf_vl.observe.clip_files import animated
from rlinf_vl.observe.conversation import Placeholders, messages
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.types import Group, ImageRef, Trajectory, TurnAdvantages

#: The columns of one row a trajectory. Lists with a value per token begin after the prompt and go
#: through the trajectory's sequences one after the other; each of `TokenSequence.columns` is a
#: further column, under its own name.
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),  # train or val
        ("group_id", pa.string()),
        ("problem_id", pa.string()),
        ("labels", pa.string()),  # JSON; short columns of its row
        ("sample", pa.int32()),  # its number within the group
        ("prompt", pa.string()),  # as the model reads it; images are <image>, videos <video>
        ("prompt_ids", pa.list_(pa.int32())),  # with which all its sequences begin
        ("response", pa.string()),
        ("answer", pa.string()),  # the reference
        ("images", pa.list_(pa.string())),  # paths in the run's folder
        ("tokens", pa.list_(pa.string())),  # the text of each, alone
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),  # false: not sampled, but an environment's
        ("rollout_logprobs", pa.list_(pa.float32())),  # null: the engine returned none
        (
            "train_logprobs",
            pa.list_(pa.float32()),
        ),  # under the weights before the step; null: not trained on
        ("turns", pa.string()),  # JSON; see `layout`
        ("messages", pa.string()),  # JSON; of each sequence, see `conversation.messages`
        ("advantage", pa.float32()),  # mean over the turns, which may differ
        ("reward", pa.float32()),
        ("reward_parts", pa.string()),  # JSON
        ("metrics", pa.string()),  # JSON; what the environment measured
        ("correct", pa.bool_()),
        # true: it was sampled with the corrupted images above and is trained on with the clean ones
        ("corrupted", pa.bool_()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("weight_versions", pa.list_(pa.int32())),
    ]
)


class TrajectoryStore:
    """The folders of trajectories and images: rows by step, images by hash, up to `max_bytes` in
    all."""

    def __init__(
        self,
        run_dir: Path,
        model_path: str,
        image_token: str | int,
        max_bytes: float,
        video_id: int | None = None,
    ) -> None:
        """Open the folders of a run.

        `image_token` is the placeholder of an image token, as text or by its id; `video_id` that of
        a clip's, None for a model that has none.
        """
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._folder = run_dir / "trajectories"
        images = run_dir / "images"
        self._bytes = 0
        for folder in (self._folder, images):
            folder.mkdir(parents=True, exist_ok=True)
            self._bytes += sum(file.stat().st_size for file in folder.iterdir())
        self._paths = {file.stem: f"images/{file.name}" for file in images.glob("[!.]*")}
        local = Path(model_path) / "tokenizer.json"
        self._tokenizer = (
            Tokenizer.from_file(str(local))
            if local.exists()
            else Tokenizer.from_pretrained(model_path)
        )
        text = (
            self._tokenizer.id_to_token(image_token)
            if isinstance(image_token, int)
            else image_token
        )
        # a run of placeholders is one image; a model without images has a pattern that never
        # matches
        self._image_pattern = re.compile(f"({re.escape(text)})+" if text else "(?!)")
        self._image_id = (
            image_token
            if isinstance(image_token, int)
            else self._tokenizer.token_to_id(image_token)
        )
        self._video_pattern = _video_pattern(
            None if video_id is None else self._tokenizer.id_to_token(video_id)
        )
        self._placeholders = Placeholders(self._image_id, video_id)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._piece = cache(
            lambda token: self._tokenizer.decode([token], skip_special_tokens=False)
        )
        self._rows: list[dict[str, Any]] = []

    def add(
        self,
        step: int,
        split: str,
        group: Group,
        advantages: Sequence[TurnAdvantages] | None = None,
        logprobs: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Make rows of a group, for the next `write`.

        Args:
            advantages: of each turn of each trajectory, or of the turn's sampled tokens; None where
                nothing is trained (validation).
            logprobs: float32 [sampled tokens] by the trajectory's number; one that was not trained
                on has none.
        """
        prompt = self._tokenizer.decode(group.prefix.tolist(), skip_special_tokens=False)
        shared = {
            "step": step,
            "split": split,
            "group_id": group.id,
            "problem_id": group.problem_id,
            "labels": json.dumps(group.labels, ensure_ascii=False),
            "prompt": self._video_pattern.sub(
                "<video>", self._image_pattern.sub("<image>", prompt)
            ),
            "prompt_ids": group.prefix,
            "answer": group.answer,
        }
        for sample, t in enumerate(group.trajectories):
            turn_advantages = None if advantages is None else advantages[sample]
            sampled_logprobs = (logprobs or {}).get(sample)
            self._rows.append(
                shared
                | self._row(
                    group.as_seen(t), group.prefix_length, turn_advantages, sampled_logprobs
                )
            )
            self._rows[-1]["sample"] = sample

    def _row(
        self,
        t: Trajectory,
        prompt_length: int,
        advantages: TurnAdvantages | None,
        sampled_logprobs: np.ndarray | None,
    ) -> dict[str, Any]:
        """Return the row of a trajectory whose sequences begin with a prompt of `prompt_length`
        tokens.

        Args:
            sampled_logprobs: float32 [sampled tokens], the trainer's; None if it was not trained
                on.
        """
        images = {image.hash: image for s in t.sequences for image, _ in s.images}
        parts: dict[
            str, list[np.ndarray]
        ] = {}  # by column: the array of each sequence, without the prompt
        for sequence in t.sequences:
            for name, array in sequence.arrays().items():
                if array.ndim == 1:  # nobody reads many numbers a token as text
                    parts.setdefault(name, []).append(array[prompt_length:])
        if advantages is not None and any(isinstance(x, np.ndarray) for x in advantages):
            parts["advantages"] = _token_advantages(t, prompt_length, advantages)
        turn_means = None if advantages is None else [_mean(x) for x in advantages]
        arrays = {
            name: np.concatenate(arrays_of_column) for name, arrays_of_column in parts.items()
        }
        ids = arrays.pop("ids", np.zeros(0, np.int32)).tolist()
        mask = arrays.pop("loss_mask", np.zeros(0, bool))
        train_logprobs = None
        if sampled_logprobs is not None:
            train_logprobs = np.full(len(ids), np.nan, np.float32)
            train_logprobs[mask] = sampled_logprobs
        return {
            "response": self._tokenizer.decode(ids, skip_special_tokens=True),
            "tokens": [self._piece(i) for i in ids],
            "response_ids": ids,
            "response_mask": mask,
            "rollout_logprobs": arrays.pop("logprobs", None),
            "train_logprobs": train_logprobs,
            "turns": json.dumps(
                layout(t, prompt_length, turn_means) | branches(t, self._placeholders.ids)
            ),
            "messages": json.dumps(self._messages(t, list(images)), ensure_ascii=False),
            "images": [self._image_path(image) for image in images.values()],
            "advantage": float(np.mean(turn_means)) if turn_means else None,
            "reward": t.reward,
            "reward_parts": json.dumps(t.reward_parts),
            "metrics": json.dumps(t.metrics),
            "correct": None if t.error else t.correct,
            "corrupted": t.corrupted,
            "error": t.error or t.penalized or None,
            "finish_reason": t.status,
            "weight_versions": arrays.pop("versions", np.zeros(0, np.int32)),
        } | arrays

    def _messages(self, t: Trajectory, images: Sequence[str]) -> list[list[dict[str, Any]]]:
        """Return the messages of each sequence; `images` are the hashes of the trajectory's images
        in order."""
        numbers = {hash_: number for number, hash_ in enumerate(images)}
        result = []
        for number, sequence in enumerate(t.sequences):
            turns = {
                turn_number: turn
                for turn_number, turn in enumerate(t.turns)
                if turn.sequence == number
            }
            result.append(
                messages(sequence, turns, numbers, self._special, self._placeholders, self._text)
            )
        return result

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _image_path(self, image: ImageRef) -> str:
        """Return the path of an image or a clip in the run's folder; writes it if it is new."""
        if image.hash not in self._paths:
            data = image.data
            try:
                data = animated(image) if is_clip(image) else data
                kind = (Image.open(io.BytesIO(data)).format or "bin").lower()
            except OSError:  # an image that a reader can't open is kept as it is
                kind = "bin"
            self._paths[image.hash] = f"images/{image.hash}.{kind}"
            self._write(self._run_dir / self._paths[image.hash], data)
        return self._paths[image.hash]

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        with write_aside(path, durable=False) as aside:
            aside.write_bytes(data)
        self._bytes += len(data)

    def write(self, step: int) -> list[dict[str, Any]]:
        """Write the added rows as step `step`, and return them."""
        rows, self._rows = self._rows, []
        if rows:
            extra_columns = {
                name: values
                for row in rows
                for name, values in row.items()
                if name not in SCHEMA.names
            }
            fields = [
                pa.field(name, pa.list_(pa.from_numpy_dtype(x.dtype)))
                for name, x in extra_columns.items()
            ]
            file = io.BytesIO()
            pq.write_table(
                pa.Table.from_pylist(rows, pa.schema([*SCHEMA, *fields])), file, compression="zstd"
            )
            self._write(self._folder / f"step_{step}.parquet", file.getvalue())
        return rows

    @property
    def full(self) -> bool:
        return self._bytes >= self._max_bytes

    def drop_after(self, step: int) -> None:
        """Return to `step`: drop the rows not yet written and the files of later steps, which are
        trained again."""
        self._rows = []
        for file in self._folder.glob("step_*.parquet"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def _mean(advantages: float | np.ndarray) -> float:
    """Return a turn's advantage: the mean over its tokens, 0 without one."""
    return float(np.mean(advantages)) if np.size(advantages) else 0.0


def _token_advantages(
    t: Trajectory, prompt_length: int, advantages: TurnAdvantages
) -> list[np.ndarray]:
    """Return the advantages of each sequence's tokens behind the prompt, float32; 0 where a token
    was not sampled."""
    arrays = [np.zeros(len(sequence.ids), np.float32) for sequence in t.sequences]
    for turn, values in zip(t.turns, advantages, strict=True):
        sampled = t.sequences[turn.sequence].loss_mask[turn.start : turn.end]
        arrays[turn.sequence][turn.start : turn.end][sampled] = values
    return [array[prompt_length:] for array in arrays]


def layout(
    t: Trajectory, prompt_length: int, advantages: Sequence[float] | None
) -> dict[str, list]:
    """Return the positions of sequences and turns among the row's tokens (those after the prompt,
    of all sequences).

    The form is {"sequences": [0, …], "turns": [{"start", "end", "finish_reason", "reward"}, …]}. A
    turn also has "advantage" if it was trained on, "thought" (the end of its thoughts) if it has
    some, and the facts of `Turn.info` ("tool_calls", "state") if there are any. `branches` adds how
    several sequences go on from each other.
    """
    starts = np.cumsum([0, *(len(s.ids) - prompt_length for s in t.sequences)])[:-1].tolist()
    turns = []
    for number, turn in enumerate(t.turns):
        offset = starts[turn.sequence] - prompt_length
        span = {"start": turn.start + offset, "end": turn.end + offset}
        facts = json.loads(turn.info or "{}")
        turns.append(facts | span | {"finish_reason": turn.finish_reason, "reward": turn.reward})
        turns[-1] |= {} if advantages is None else {"advantage": advantages[number]}
        turns[-1] |= {"thought": turn.start + offset + turn.thought} if turn.thought else {}
    return {"sequences": starts, "turns": turns}


def branches(t: Trajectory, placeholder_ids: tuple[int, ...]) -> dict[str, list]:
    """Return which sequence of a trajectory goes on from which, for `layout`; {} if it has one.

    The form is {"branches": [{"parent", "turn", "shared"}, …]}, one for each sequence: the last turn
    that it goes on from and that turn's sequence, both null for a conversation of its own, and the
    number of tokens that it shares with an earlier sequence.
    """
    if len(t.sequences) < 2:
        return {}
    result: list[dict[str, int | None]] = []
    for number, sequence in enumerate(t.sequences):
        shared_lengths = [
            earlier.shared_length(sequence, placeholder_ids) for earlier in t.sequences[:number]
        ]
        # Without its end token: what follows may close an answer that was cut in another way.
        continued = [
            turn_number
            for turn_number, turn in enumerate(t.turns)
            if turn.sequence < number and shared_lengths[turn.sequence] >= turn.end - 1
        ]
        # A common beginning alone, such as the same system message, continues no turn.
        last = max(continued, key=lambda turn_number: t.turns[turn_number].end, default=None)
        result.append(
            {
                "parent": None if last is None else t.turns[last].sequence,
                "turn": last,
                "shared": max(shared_lengths, default=0),
            }
        )
    return {"branches": result}


def _video_pattern(placeholder: str | None) -> re.Pattern[str]:
    """Return the pattern of a clip in a prompt: its placeholders, the marks around each run of
    them and the times before; one that never matches without a placeholder."""
    if not placeholder:
        return re.compile("(?!)")
    mark = r"(?:<\|[\w-]{1,40}\|>)?"
    run = rf"(?:<\d+\.\d seconds>)?{mark}(?:{re.escape(placeholder)})+{mark}"
    return re.compile(rf"(?:{run})+")
