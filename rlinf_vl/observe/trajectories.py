"""Trajectories on disk: what was shown, answered and paid, with both sides' logprobs of every token.

`trajectories/step_N.parquet` has one row a trajectory (`SCHEMA`), `images/` each image once, by content.
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

from rlinf_vl.observe.conversation import messages
from rlinf_vl.runtime.files import write_aside
from rlinf_vl.types import Group, ImageRef, Trajectory

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),  # train or val
        ("group_id", pa.string()),
        ("problem_id", pa.string()),
        ("labels", pa.string()),  # JSON; short columns of its row
        ("sample", pa.int32()),  # number within its group
        ("prompt", pa.string()),  # as the model reads it; an image is <image>
        ("response", pa.string()),
        ("answer", pa.string()),  # the reference
        ("images", pa.list_(pa.string())),  # paths in the run's folder
        ("tokens", pa.list_(pa.string())),  # the text of each, alone
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),  # false: an environment's, not sampled
        ("rollout_logprobs", pa.list_(pa.float32())),  # null: the engine returned none
        ("train_logprobs", pa.list_(pa.float32())),  # of the weights before the step; null: not trained on
        ("turns", pa.string()),  # JSON; see `layout`
        ("messages", pa.string()),  # JSON; of each sequence, see `conversation.messages`
        ("advantage", pa.float32()),  # mean over the turns, which may differ
        ("reward", pa.float32()),
        ("reward_parts", pa.string()),  # JSON
        ("metrics", pa.string()),  # JSON; what the environment measured
        ("correct", pa.bool_()),
        # it saw images that were corrupted, those above; it is trained on with the clean ones
        ("corrupted", pa.bool_()),
        ("error", pa.string()),
        ("finish_reason", pa.string()),
        ("weight_versions", pa.list_(pa.int32())),
    ]
)
"""One row a trajectory. Lists of what tokens have begin after the prompt and go through the trajectory's sequences one after
the other; each of `TokenSequence.columns` is a further one, under its own name."""


class TrajectoryStore:
    """The folder: rows by step, images by hash, up to `max_bytes` in all."""

    def __init__(self, run_dir: Path, model_path: str, image_token: str | int, max_bytes: int) -> None:
        """`image_token`: the placeholder of an image token, as text or by its id."""
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
        self._tokenizer = Tokenizer.from_file(str(local)) if local.exists() else Tokenizer.from_pretrained(model_path)
        text = self._tokenizer.id_to_token(image_token) if isinstance(image_token, int) else image_token
        self._image = re.compile(f"({re.escape(text)})+" if text else "(?!)")
        self._image_id = image_token if isinstance(image_token, int) else self._tokenizer.token_to_id(image_token)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._piece = cache(lambda token: self._tokenizer.decode([token], skip_special_tokens=False))
        self._rows: list[dict[str, Any]] = []

    def add(
        self,
        step: int,
        split: str,
        group: Group,
        advantages: Sequence[Sequence[float]] | None = None,
        logprobs: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Make rows of a group, for the next `write`.

        Args:
            advantages: of each turn of each trajectory; None where nothing is trained (validation).
            logprobs: float32 [sampled tokens] by the trajectory's number; one that was not trained on has none.
        """
        prompt = self._tokenizer.decode(group.prefix.tolist(), skip_special_tokens=False)
        shared = {
            "step": step,
            "split": split,
            "group_id": group.id,
            "problem_id": group.problem_id,
            "labels": json.dumps(group.labels, ensure_ascii=False),
            "prompt": self._image.sub("<image>", prompt),
            "answer": group.answer,
        }
        for sample, t in enumerate(group.trajectories):
            own = None if advantages is None else advantages[sample]
            self._rows.append(
                shared | self._row(group.as_seen(t), group.prefix_length, own, (logprobs or {}).get(sample))
            )
            self._rows[-1]["sample"] = sample

    def _row(
        self, t: Trajectory, prompt: int, advantages: Sequence[float] | None, train: np.ndarray | None
    ) -> dict[str, Any]:
        images = {image.hash: image for s in t.sequences for image, _ in s.images}
        parts = [{name: array[prompt:] for name, array in s.arrays().items()} for s in t.sequences]
        names = (name for name in (parts[0] if parts else ()) if name != "routes")  # many numbers a token, and no text
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in names}
        ids = arrays.pop("ids", np.zeros(0, np.int32)).tolist()
        mask = arrays.pop("loss_mask", np.zeros(0, bool))
        train_logprobs = None
        if train is not None:
            train_logprobs = np.full(len(ids), np.nan, np.float32)
            train_logprobs[mask] = train
        return {
            "response": self._tokenizer.decode(ids, skip_special_tokens=True),
            "tokens": [self._piece(i) for i in ids],
            "response_ids": ids,
            "response_mask": mask,
            "rollout_logprobs": arrays.pop("logprobs", None),
            "train_logprobs": train_logprobs,
            "turns": json.dumps(layout(t, prompt, advantages)),
            "messages": json.dumps(self._messages(t, list(images)), ensure_ascii=False),
            "images": [self._image_path(image) for image in images.values()],
            "advantage": float(np.mean(advantages)) if advantages else None,
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
        numbers = {hash_: number for number, hash_ in enumerate(images)}
        said = []
        for number, sequence in enumerate(t.sequences):
            turns = {k: turn for k, turn in enumerate(t.turns) if turn.sequence == number}
            said.append(messages(sequence, turns, numbers, self._special, self._image_id, self._text))
        return said

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _image_path(self, image: ImageRef) -> str:
        if image.hash not in self._paths:
            try:
                kind = (Image.open(io.BytesIO(image.data)).format or "bin").lower()
            except OSError:
                kind = "bin"
            self._paths[image.hash] = f"images/{image.hash}.{kind}"
            self._write(self._run_dir / self._paths[image.hash], image.data)
        return self._paths[image.hash]

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        with write_aside(path, durable=False) as aside:
            aside.write_bytes(data)
        self._bytes += len(data)

    def write(self, step: int) -> list[dict[str, Any]]:
        """Write what was added as step `step`; returns those rows."""
        rows, self._rows = self._rows, []
        if rows:
            further = {name: values for row in rows for name, values in row.items() if name not in SCHEMA.names}
            fields = [pa.field(name, pa.list_(pa.from_numpy_dtype(x.dtype))) for name, x in further.items()]
            file = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows, pa.schema([*SCHEMA, *fields])), file, compression="zstd")
            self._write(self._folder / f"step_{step}.parquet", file.getvalue())
        return rows

    @property
    def full(self) -> bool:
        return self._bytes >= self._max_bytes

    def drop_after(self, step: int) -> None:
        """Go back to `step`: later steps are trained again."""
        self._rows = []
        for file in self._folder.glob("step_*.parquet"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def layout(t: Trajectory, prompt: int, advantages: Sequence[float] | None) -> dict[str, list]:
    """Where the row's tokens (those after the prompt, of all sequences) begin a sequence, and every turn: {"sequences": [0, …],
    "turns": [{"start", "end", "finish_reason", "reward"}, …]}, with "advantage" where it was trained on, "thought" (where its
    thoughts end) if it has some, and the facts of `Turn.info` ("tool_calls", "state") where there are any."""
    starts = np.cumsum([0, *(len(s.ids) - prompt for s in t.sequences)])[:-1].tolist()
    turns = []
    for number, turn in enumerate(t.turns):
        offset = starts[turn.sequence] - prompt
        where = {"start": turn.start + offset, "end": turn.end + offset}
        turns.append(
            json.loads(turn.info or "{}") | where | {"finish_reason": turn.finish_reason, "reward": turn.reward}
        )
        turns[-1] |= {} if advantages is None else {"advantage": advantages[number]}
        turns[-1] |= {"thought": turn.start + offset + turn.thought} if turn.thought else {}
    return {"sequences": starts, "turns": turns}
