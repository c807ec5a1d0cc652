"""Conversions: our requests and weights to SGLang's messages, and its outputs to our samples."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf_vl.engines.sglang import masked, receive
from rlinf_vl.engines.sglang.pixels import MappedPatches
from rlinf_vl.models.image_tokens import ImageTokens, runs_of_images
from rlinf_vl.models.mixture import ROUTES
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.types import Grid, Request, Sample, SamplingParams
from rlinf_vl.weights.buckets import Label, flatten
from rlinf_vl.weights.delta import Delta
from rlinf_vl.weights.staging import StagedBucket

#: First and last position of each run of placeholders of an image.
Runs = list[tuple[int, int]]


def parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Return SGLang's sampling parameters.

    SGLang also stops at the end ids of the checkpoint; they are among `stop_ids`
    (`Processor.stop_ids`).
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
    }


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of a request, in the form that our multimodal processor expects.

    Attributes:
        patches: pixels from the trainer's image processor.
        grid: (t, h, w) in patches.
        runs: those of its placeholders, see `placeholder_runs`.
        is_clip: whether it is the clip of a video.
        identity: 32 bytes. Images with the same identity are the same image to SGLang's prefix
            cache, and to its cache of embeddings, which survives every update. So the identity
            depends on the vision tower's weights, too.
    """

    patches: MappedPatches
    grid: tuple[int, int, int]
    runs: Runs
    is_clip: bool
    identity: bytes


def placeholder_runs(request: Request, image_tokens: ImageTokens) -> list[Runs]:
    """Return the first and last position of each run of each image's placeholders in the ids.

    A picture has one run, or several where there are marks between its tiles; a clip has as many as
    its family writes.

    Raises:
        ValueError: the runs are not those of the images, by number, length or id. SGLang would
            answer without an image, or for the wrong one, without an error.
    """
    bounds = np.array([0, len(request.ids)])
    edges = runs_of_images(image_tokens.mask(request.ids), bounds).tolist()
    runs = [(first, end - 1) for first, end in edges]
    description = f"a request of {len(request.ids)} ids with {len(request.images)} images"
    wrong_number = (
        f"{description} has {len(runs)} runs of image placeholders (id "
        f"{' or '.join(map(str, image_tokens.placeholder_ids))})"
    )
    grids = request.image_grids.tolist()
    placeholder_ids = list(map(image_tokens.placeholder_of, request.images))
    n_runs = sum(map(image_tokens.runs, grids, placeholder_ids))
    if n_runs != len(runs) and not image_tokens.marks:
        raise ValueError(f"{wrong_number}, not {n_runs}")
    runs_by_image: list[Runs] = []
    n_used = 0  # runs of earlier images
    counts = image_tokens(request.image_grids).tolist()
    for i, (image, grid) in enumerate(zip(request.images, grids, strict=True)):
        placeholder_id = placeholder_ids[i]
        image_runs: Runs = []
        while n_used < len(runs) and _length(image_runs) < counts[i]:
            image_runs.append(runs[n_used])
            n_used += 1
        if not _are_runs_of(image_runs, request.ids, grid, counts[i], placeholder_id, image_tokens):
            places = ", ".join(f"{first} to {last}" for first, last in image_runs) or "none"
            ids = sorted({int(request.ids[first]) for first, _ in image_runs})
            raise ValueError(
                f"{description}: image {i} ({image.hash[:12]}) of grid {grid} takes {counts[i]} "
                f"placeholders, of id {placeholder_id}, but the run at {places} has "
                f"{_length(image_runs)}, of id {' and '.join(map(str, ids)) or 'none'}"
            )
        runs_by_image.append(image_runs)
    if n_used < len(runs):
        raise ValueError(f"{wrong_number}, not {n_used}")
    return runs_by_image


def _length(runs: Runs) -> int:
    """Return the number of placeholders in these runs."""
    return sum(last - first + 1 for first, last in runs)


def _are_runs_of(
    runs: Runs,
    ids: np.ndarray,
    grid: Grid,
    n_tokens: int,
    placeholder_id: int,
    image_tokens: ImageTokens,
) -> bool:
    """Return whether runs are those of an image with this grid and so many placeholders."""
    if _length(runs) != n_tokens or any(ids[first] != placeholder_id for first, _ in runs):
        return False
    if image_tokens.marks:  # they stand where the image processor has put them, between tiles
        return all(_length([run]) % image_tokens.tokens_per_tile == 0 for run in runs)
    n_runs = image_tokens.runs(grid, placeholder_id)
    return len(runs) == n_runs and all(_length([run]) * n_runs == n_tokens for run in runs)


def sent_images(
    request: Request,
    runs: Sequence[Runs],
    patches: Sequence[MappedPatches],
    video_id: int,
    tower: int,
) -> list[SentImage]:
    """Return the images of a request in SGLang's form.

    Args:
        request: the request.
        runs: its `placeholder_runs`.
        patches: pixels of its images.
        video_id: the id of a clip's placeholders.
        tower: version number of the vision tower's weights.
    """
    return [
        SentImage(
            image_patches,
            tuple(grid),
            image_runs,
            bool(request.ids[image_runs[0][0]] == video_id),
            _identity(f"{image.hash} {tower}"),
        )
        for image, grid, image_runs, image_patches in zip(
            request.images, request.image_grids.tolist(), runs, patches, strict=True
        )
    ]


def _identity(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def as_sample(
    output: dict[str, Any],
    stop_ids: Sequence[int],
    prompt: int,
    mixture: Mixture | None,
    interrupted: bool = False,
) -> Sample:
    """Convert one of SGLang's outputs.

    Args:
        output: the output of one sample.
        stop_ids: of the request.
        prompt: tokens of the prompt.
        mixture: given if the sample has the column `ROUTES`.
        interrupted: an update may have aborted the sample; otherwise an aborted one has failed.
    """
    meta = output["meta_info"]
    scored = meta.get("output_token_logprobs") or []
    ids = np.asarray(output["output_ids"], np.int32)
    assert ids.tolist() == [entry[1] for entry in scored], (
        "ids and logprobs of a sample are not aligned"
    )
    versions = np.full(len(ids), -1, np.int32)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = int(span["version"])
    assert (versions >= 0).all(), (
        f"SGLang did not say which weights sampled each token: {meta.get('weight_versions')}"
    )
    reason = meta["finish_reason"]["type"]
    if reason == "length" and len(ids) and int(ids[-1]) in stop_ids:
        reason = "stop"
    logprobs = np.asarray([entry[0] for entry in scored], np.float32)
    columns = {}
    if mixture is not None:
        columns[ROUTES] = routes_of(meta.get("routed_experts"), prompt + len(ids), mixture)
    if reason not in ("stop", "length") and not (reason == "abort" and interrupted):
        reason = "error"
    return Sample(ids, logprobs, versions, reason, columns)


def joined(first: Sample, continuation: Sample, sampling: SamplingParams) -> Sample:
    """Join an interrupted sample and its continuation.

    A continuation interrupted in turn ends the sample all the same if its last token is a stop id
    or the last one allowed.
    """
    ids = np.concatenate([first.ids, continuation.ids])
    logprobs = np.concatenate([first.logprobs, continuation.logprobs])
    versions = np.concatenate([first.versions, continuation.versions])
    reason = continuation.finish_reason
    if reason == "abort" and len(ids) and int(ids[-1]) in sampling.stop_ids:
        reason = "stop"
    elif reason == "abort" and len(ids) == sampling.max_new_tokens:
        reason = "length"
    # SGLang reports experts of the whole prompt, the tokens of `first` included.
    return Sample(ids, logprobs, versions, reason, continuation.columns)


def routes_of(encoded: str | None, tokens: int, mixture: Mixture) -> np.ndarray:
    """Decode the column `ROUTES` from SGLang's report: base64 of int32 [tokens - 1, layers of the
    model, k], for all tokens but the last, whose routes are zeros."""
    routes = np.zeros((tokens, len(mixture.layers) * mixture.top_k), mixture.dtype)
    if encoded is not None:
        reported = np.frombuffer(base64.b64decode(encoded), np.int32).reshape(
            tokens - 1, -1, mixture.top_k
        )
        routes[:-1] = reported[:, list(mixture.layers)].reshape(tokens - 1, -1)
    return routes


def bucket_fields(bucket: dict[str, torch.Tensor], tp_size: int) -> dict[str, Any]:
    """Return the fields of an `UpdateWeightsFromTensorReqInput` with the bucket as one flat tensor
    in shared memory."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=list(bucket.items()))
    content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return {
        "serialized_named_tensors": [
            MultiprocessingSerializer.serialize(content) for _ in range(tp_size)
        ]
    }


def masked_fields(bucket: dict[str, torch.Tensor], tp_size: int) -> dict[str, Any]:
    """Return the fields as `bucket_fields` does, for weights that are NaN where they do not
    change."""
    from sglang.srt.utils import MultiprocessingSerializer

    content = masked.message(Label.of(bucket.items()).entries, flatten(list(bucket.items())))
    serialized = [MultiprocessingSerializer.serialize(content) for _ in range(tp_size)]
    return {"serialized_named_tensors": serialized, "load_format": masked.LOADER}


def staged_fields(
    buckets: Sequence[StagedBucket], answer: tuple[str, str], is_last: bool
) -> dict[str, Any]:
    """Return the fields as `bucket_fields` does, with the bucket that each scheduler opens."""
    from sglang.srt.utils import MultiprocessingSerializer

    no_data = torch.empty(0, dtype=torch.uint8)
    serialized = [
        MultiprocessingSerializer.serialize(
            receive.encode(receive.BucketMessage(bucket, answer, number, is_last), no_data)
        )
        for number, bucket in enumerate(buckets)
    ]
    return {"serialized_named_tensors": serialized, "load_format": receive.LOADER}


def delta_fields(
    deltas: Sequence[Delta], engine_names: receive.EngineNames, tp_size: int
) -> dict[str, Any]:
    """Return the fields as `bucket_fields` does, with all ranks' changes of one bucket."""
    from sglang.srt.utils import MultiprocessingSerializer

    empty, sizes, data = receive.emptied(deltas)
    content = receive.encode(receive.DeltaMessage(empty, sizes, engine_names), data)
    serialized = [MultiprocessingSerializer.serialize(content) for _ in range(tp_size)]
    return {"serialized_named_tensors": serialized, "load_format": receive.LOADER}


def forget_fields(tp_size: int) -> dict[str, Any]:
    """Return the fields as `bucket_fields` does, which make all weights NaN."""
    from sglang.srt.utils import MultiprocessingSerializer

    content = receive.encode(receive.ForgetMessage(), torch.empty(0, dtype=torch.uint8))
    serialized = [MultiprocessingSerializer.serialize(content) for _ in range(tp_size)]
    return {"serialized_named_tensors": serialized, "load_format": receive.LOADER}


def label_fields(label: Label, group: str) -> dict[str, Any]:
    """Return the fields of an `UpdateWeightsFromDistributedReqInput` that announces the bucket's
    broadcast in `group`."""
    names, dtypes, shapes = (list(column) for column in zip(*label.entries, strict=True))
    return {
        "names": names,
        "dtypes": dtypes,
        "shapes": [list(shape) for shape in shapes],
        "group_name": group,
    }
