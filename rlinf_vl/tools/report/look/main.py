"""The verb `look`: scores the recorded answers of a finished run with and without their images, and
maps which patches they depend on."""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlinf_vl.config.processing import processor_options
from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.views import blank
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.export.export import restore
from rlinf_vl.models.loading import use_packed_attention, vocab_size
from rlinf_vl.models.lora import merge_adapters
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import Processor
from rlinf_vl.packing.collator import Collator
from rlinf_vl.runtime.checkpoints import checkpoint_at, checkpoints, load_state
from rlinf_vl.tools.report.look.occlusion import edge_share
from rlinf_vl.tools.report.look.recorded import Recorded, read_recorded, recorded_steps
from rlinf_vl.tools.report.look.scorer import Scorer, with_images
from rlinf_vl.tools.report.look_files import WITH_BLANKS, WITH_IMAGES, write_look

log = logging.getLogger(__name__)

#: Drop of an answer's log-probability, in nats a token, from which it is said to need its images.
NEEDS_IMAGES = 0.05
#: Sum of a heat map's positive values, in nats, from which it says something.
SAYS_SOMETHING = 0.5


class Model(NamedTuple):
    """A checkpoint's policy, with what reads and shows images for it."""

    scorer: Scorer
    processor: Processor


def look(
    run: Path,
    step: int | None = None,
    *,
    checkpoint: Path | None = None,
    split: str = "val",
    heat_maps: int = 8,
    forwards: int = 64,
    trust_run_code: bool = False,
) -> tuple[Path, list[dict[str, Any]]]:
    """Score a step's recorded answers, and write `look/step_N.parquet`.

    Args:
        step: None for the newest recorded step.
        checkpoint: the weights; None for those of the step, or the nearest.
        split: "val", "train" or "all".
        heat_maps: how many trajectories get a map of each of their pictures.
        forwards: the most forwards for one picture's map.
        trust_run_code: as in `restore`.

    Returns:
        The file, and its rows.

    Raises:
        ConfigError: nothing is recorded, or the run has no checkpoint.
    """
    steps = recorded_steps(run)
    if not steps:
        raise ConfigError(
            f"{run}: no recorded trajectories; runner.trajectories.max_gb=0 records none"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ConfigError(
            f"--step {step}: nothing is recorded of it; recorded are {_listed(steps)}"
        )
    if checkpoint is None:
        checkpoint = _nearest(run, step)
    weights_step = int(load_state(checkpoint_at(checkpoint))["step"])
    model = _load(checkpoint, split, trust_run_code)
    recorded = read_recorded(run, step, split, model.processor.grid)
    if not recorded:
        raise ConfigError(f"--split {split}: no recorded trajectory of step {step} shows an image")
    trajectories = [item.trajectory for item in recorded]
    blanks = [_blanked(item) for item in recorded]
    with_images_scores, blank_scores = (
        model.scorer.logprobs(trajectories),
        model.scorer.logprobs(blanks),
    )
    rows = []
    for number, item in enumerate(recorded):
        maps = _heat_maps(model, item, forwards) if number < heat_maps else []
        group_split, group_id, sample = item.key
        rows.append(
            {
                "split": group_split,
                "group_id": group_id,
                "sample": sample,
                WITH_IMAGES: _per_token(item, with_images_scores[number]),
                WITH_BLANKS: _per_token(item, blank_scores[number]),
                "heat_maps": json.dumps(maps),
                "weights_step": weights_step,
            }
        )
    return write_look(run, step, rows), rows


def _nearest(run: Path, step: int) -> Path:
    """Return the run's checkpoint nearest to a step. Raises ConfigError if it has none."""
    saved = checkpoints(run)
    if not saved:
        raise ConfigError(
            f"{run}: no complete checkpoint, so nothing can be scored; --checkpoint DIR names one, "
            "and runner.save_interval writes them"
        )
    # Of two equally near the earlier one: later weights were trained on more.
    saved_step, folder = min(saved, key=lambda entry: (abs(entry[0] - step), entry[0]))
    if saved_step != step:
        log.warning("no checkpoint of step %d: scored by the weights of step %d", step, saved_step)
    return Path(str(folder))


def _load(checkpoint: Path, split: str, trust_run_code: bool) -> Model:
    """Load a checkpoint as the trainer computes with it, in float32 (bfloat16 on a GPU)."""
    restored = restore(checkpoint, trust_run_code)
    config = restored.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = restored.model
    merge_adapters(model)
    processor = Processor(restored.base, restored.family, **processor_options(config))
    algorithm = config.algorithm
    sampling = algorithm.sampling_params if split == "train" else algorithm.val_sampling_params
    policy = PolicyModel(
        use_packed_attention(model, restored.family),
        restored.family,
        processor.banned_ids(vocab_size(model)),
        # Greedy answers are scored by the distribution that they are the mode of.
        temperature=sampling.temperature or 1.0,
    ).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    collate = Collator(restored.family, processor.image_tokens, processor.pixels, processor.pad_id)
    return Model(Scorer(policy, collate, config.runner.max_tokens_per_mbs), processor)


def _blanked(item: Recorded) -> Any:
    return with_images(item.trajectory, {image.hash: blank(image) for image in item.images})


def _heat_maps(model: Model, item: Recorded, forwards: int) -> list[dict[str, Any]]:
    """Return the map of each picture of a trajectory; clips have none."""
    maps = []
    for number, image in enumerate(item.images):
        if is_clip(image):
            continue
        _, rows, columns = model.processor.grid(image)
        heat_map = model.scorer.heat_map(item.trajectory, image, (rows, columns), forwards)
        values = [[round(float(value), 6) for value in line] for line in heat_map.values]
        maps.append({"image": number, "values": values, "forwards": heat_map.forwards})
    return maps


def _log_heat_maps(rows: Sequence[dict[str, Any]]) -> None:
    """Log how many maps say something, and how much of them lies at the pictures' edges."""
    maps: list[np.ndarray] = []
    for row in rows:
        maps += [np.array(heat_map["values"]) for heat_map in json.loads(row["heat_maps"])]
    if not maps:
        return
    telling = [values for values in maps if np.maximum(values, 0).sum() >= SAYS_SOMETHING]
    log.info("%d of %d heat maps sum to %g nats or more", len(telling), len(maps), SAYS_SOMETHING)
    if telling:
        log.info(
            "of those, %.0f %% lies on the outermost patches, which are %.0f %% of the pictures",
            100 * np.mean([edge_share(values) for values in telling]),
            100 * np.mean([edge_share(np.ones(values.shape)) for values in telling]),
        )


def _per_token(item: Recorded, logprobs: np.ndarray) -> np.ndarray:
    """Return float32 [tokens], NaN where not sampled."""
    values = np.full(len(item.mask), np.nan, np.float32)
    values[item.mask] = logprobs
    return values


def _listed(steps: Sequence[int]) -> str:
    numbers = ", ".join(map(str, steps[-10:]))
    return numbers if len(steps) <= 10 else f"…, {numbers}"


def main(arguments: argparse.Namespace) -> int:
    """Score a run's step, rebuild its report, and say what was found."""
    from rlinf_vl.tools.report.build import build_report

    file, rows = look(
        arguments.run,
        arguments.step,
        checkpoint=arguments.checkpoint,
        split=arguments.split,
        heat_maps=arguments.heat_maps,
        forwards=arguments.forwards,
        trust_run_code=arguments.trust_run_code,
    )
    drops = [float(np.nanmean(row[WITH_IMAGES] - row[WITH_BLANKS])) for row in rows]
    n_looking = sum(drop > NEEDS_IMAGES for drop in drops)
    log.info(
        "%d answers, scored by the weights of step %d: without their images they lose %.3f nats a "
        "token; %d of them lose more than %g",
        len(rows),
        rows[0]["weights_step"],
        sum(drops) / len(drops),
        n_looking,
        NEEDS_IMAGES,
    )
    _log_heat_maps(rows)
    log.info("written to %s; the report: %s", file, build_report([arguments.run]))
    return 0
