"""Writes recorded groups while a run goes on. It imports neither Ray, torch nor transformers: the
process that runs it starts at once, beside the processes that do."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.config.schema import Config
from rlinf_vl.observe.replay_file import write_replay
from rlinf_vl.observe.samples import MAX_IMAGES, spread
from rlinf_vl.observe.tracker import make_trackers
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.types import Group, TurnAdvantages
from rlinf_vl.user_code import is_code

log = logging.getLogger(__name__)

#: Logprobs of a rank's sampled tokens, by group and trajectory.
RankLogprobs = Mapping[int, Mapping[int, np.ndarray]]
#: Split; groups by number; the groups' advantages, turn by turn (None: validation); the logprobs of
#: each rank.
GroupBatch = tuple[
    str,
    Mapping[int, Group],
    Sequence[Sequence[TurnAdvantages]] | None,
    Sequence[RankLogprobs],
]


class TrajectoryWriter:
    """The writer of a run's trajectory files, and of the samples that trackers show."""

    def __init__(
        self, config: Config, run_dir: Path, model_path: str, image_token: str | int
    ) -> None:
        runner = config.runner
        self._run_dir = run_dir
        self._model_path = model_path
        self._max_steps = runner.max_steps
        self._store = TrajectoryStore(
            run_dir,
            model_path,
            image_token,
            runner.trajectories.max_gb * 2**30,
            _token_id(model_path, "video_token_id"),
        )
        self._samples = make_trackers(
            run_dir,
            runner.logger.logger_backends,
            project_name=runner.logger.project_name,
            experiment_name=runner.experiment_name,
            files=runner.code_files,
        )

    def drop_after(self, step: int) -> None:
        self._store.drop_after(step)

    def write(
        self,
        step: int,
        batches: Sequence[GroupBatch],
        replay_reason: str = "",
        weights: Mapping[str, np.ndarray] | None = None,
    ) -> bool:
        """Write the step's file; send samples of a validation to the trackers. Returns False when
        the disk limit is reached.

        With a `replay_reason`, also write the step's trained groups for `rlinf-vl replay`, with
        the `weights` before the step, if there are any.
        """
        for split, groups, advantages, rank_logprobs in batches:
            for g, group in groups.items():
                # Trajectories of one group may be trained on by several ranks.
                by_trajectory = {
                    i: values for rank in rank_logprobs for i, values in rank.get(g, {}).items()
                }
                self._store.add(
                    step, split, group, advantages[g] if advantages else None, by_trajectory
                )
        if replay_reason:
            self._write_replay(step, batches, replay_reason, weights or {})
        rows = spread([row for row in self._store.write(step) if row["split"] == "val"])
        if rows:
            self._samples.log_samples(
                step, [{**row, "images": self._first_images(row)} for row in rows]
            )
        return not self._store.full

    def _write_replay(
        self,
        step: int,
        batches: Sequence[GroupBatch],
        reason: str,
        weights: Mapping[str, np.ndarray],
    ) -> None:
        """Write the trained groups of a step for `rlinf-vl replay`; a failure is only logged."""
        trained = [batch[1:] for batch in batches if batch[0] == "train" and batch[2] is not None]
        try:
            for groups, advantages, rank_logprobs in trained:
                assert advantages is not None
                logprobs = {
                    (g, i): values
                    for rank in rank_logprobs
                    for g, by_index in rank.items()
                    for i, values in by_index.items()
                }
                write_replay(
                    self._run_dir, self._model_path, step, groups, advantages, logprobs, reason,
                    total_steps=max(1, self._max_steps), weights=weights,
                )  # fmt: skip
        # A run is worth more than a file about it.
        except Exception as error:
            log.warning("step %d: no replay file was written: %r", step, error)

    def _first_images(self, row: Mapping[str, Any]) -> list[bytes]:
        """Return the files of a trajectory's images, `MAX_IMAGES` at most."""
        return [(self._run_dir / path).read_bytes() for path in row["images"][:MAX_IMAGES]]

    def close(self) -> None:
        self._samples.close()


def image_token(config: Config, model_path: str) -> str | int:
    """Return the placeholder of an image token: its id, if the checkpoint's config.json has it,
    else the text that the family has."""
    model = config.rollout.model
    if not is_code(model.model_type):
        token_id = _token_id(model_path, "image_token_id")
        if token_id is not None:
            return token_id
    # Imported only where it is needed: with transformers, it takes seconds.
    from rlinf_vl.models.families import family_of

    paths, files = config.actor.model.vlm.paths, config.runner.code_files
    return family_of(
        model.model_type, model_path, model.trust_remote_code, paths, files
    ).image_token


def _token_id(model_path: str, key: str) -> int | None:
    """Return the token id of this name in a checkpoint's config.json; None if it has none."""
    file = Path(model_path) / "config.json"
    token_id = json.loads(file.read_text()).get(key) if file.exists() else None
    return token_id if isinstance(token_id, int) else None
