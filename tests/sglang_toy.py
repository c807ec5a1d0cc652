"""Checkpoints with random weights that SGLang loads, transformers' models of them, requests for them, and engines on them."""

import copy
import io
import json
import time
from functools import partial

import numpy as np
import torch
from PIL import Image
from tiny import tiny_model

from rlinf_vl.extras.toy.files import special_ids, write_toy_files
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import ImageRef, Request, Sample, SamplingParams

FAMILY = family_of("qwen3_vl")


class Toy:
    """A checkpoint with random weights, transformers' model of it, and requests for it: the toy, or a tiny member of a family."""

    def __init__(self, path, family=FAMILY, make=None):
        """`make`: writes the checkpoint; None: the toy's."""
        from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint

        (make or partial(build_toy_checkpoint, progress=False, steps=1))(path)
        self.path = str(path)
        self.family = family
        self.processor = Processor(self.path, family)
        self.renderer = Renderer(self.processor)
        self.pixels = PixelCache(self.processor.pixels)
        self.model = family.model_class.from_pretrained(self.path, dtype=torch.float32).eval()
        if make is None:
            self._amplify(self.model)
            self.model.save_pretrained(self.path)
        self.banned = self.processor.banned_ids(self.model.get_output_embeddings().weight.shape[0])

    @staticmethod
    def _amplify(model):
        """Make pictures matter: as it is initialised, the vision tower says next to nothing."""
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "visual" in name and p.ndim > 1:
                    p.mul_(2.0)

    def image(self, rng, size=(48, 48)):
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, "PNG")
        return ImageRef.of(buffer.getvalue())

    def request(self, images, n=1, text="What is the area?", seed=0, **sampling):
        """A question about `images` pictures (a number: random ones, of different sizes)."""
        if isinstance(images, int):
            rng = np.random.default_rng([images, seed])
            images = tuple(
                self.image(rng, (48 + 16 * (i % 2), 48 + 32 * (i % 3))) for i in range(images)
            )
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        ids, grids = self.renderer.prompt([message], images)
        sampling = {"max_new_tokens": 12, "stop_ids": self.processor.stop_ids} | sampling
        return Request(ids, images, grids, SamplingParams(**sampling), tuple(range(n)))

    @staticmethod
    def request_of(group):
        """The request that a group answers."""
        seeds = tuple(range(len(group.trajectories)))
        shown = group.sequences[0].images
        grids = np.array([grid for _, grid in shown], np.int32).reshape(-1, 3)
        return Request(
            group.prefix, tuple(image for image, _ in shown), grids, SamplingParams(), seeds
        )

    @staticmethod
    def samples_of(group):
        """What was sampled in each trajectory of a group."""
        samples = []
        for trajectory in group.trajectories:
            (sequence,) = trajectory.sequences
            ids, logprobs, versions = (
                array[group.prefix_length :]
                for array in (sequence.ids, sequence.logprobs, sequence.versions)
            )
            samples.append(Sample(ids, logprobs, versions, trajectory.status))
        return samples

    @torch.no_grad()
    def logp(self, request, ids, temperature=1.0, model=None):
        """float32 [R, V]: transformers' own forward, over the ids that are not banned, at each position of `ids`."""
        model = model or self.model
        row = torch.tensor(np.concatenate([request.ids, ids]), dtype=torch.int64)[None]
        inputs = {}
        if request.images:
            inputs = {
                "pixel_values": torch.from_numpy(
                    np.concatenate([self.pixels(i) for i in request.images])
                ),
                "image_grid_thw": torch.from_numpy(request.image_grids.astype(np.int64)),
                "mm_token_type_ids": (row == self.processor.image_token_id).int(),
            }
        if self.family.vision_tower:
            model.model.rope_deltas = None
        logits = (
            model(input_ids=row, attention_mask=torch.ones_like(row), **inputs).logits[0].float()
            / temperature
        )
        logits[:, torch.from_numpy(self.banned)] = -torch.inf
        where = len(request.ids) + torch.arange(len(ids))
        return logits[where - 1].log_softmax(-1)

    def of_tokens(self, request, sample, temperature=1.0, model=None):
        table = self.logp(request, sample.ids, temperature, model)
        return table[torch.arange(len(sample.ids)), torch.from_numpy(sample.ids).long()].numpy()

    def perturbed(self, part, scale=0.3, seed=3):
        """A copy of the model with noise on the weights whose name has `part` in it, and those weights, by the engine's names."""
        other, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(seed)
        changed = {}
        with torch.no_grad():
            for name, p in other.named_parameters():
                if part in name:
                    p.add_(scale * p.std(correction=0) * torch.randn(p.shape, generator=generator))
                    changed[name] = p.detach()
        return other, dict(self.sent(changed.items()))

    def with_weights(self, weights):
        """A copy of the model that has these weights, and its own where none is named."""
        other = copy.deepcopy(self.model)
        _, unknown = other.load_state_dict(weights, strict=False)
        assert not unknown
        return other

    def weights(self):
        return dict(self.sent((name, p.detach()) for name, p in self.model.named_parameters()))

    def sent(self, weights):
        """Weights of the model as the engine is sent them."""
        return (part for name, value in weights for part in self.family.engine_names(name, value))


def write_member(family, sizes, path):
    """A checkpoint with random weights, and the toy's tokenizer and image processor."""
    ids = special_ids()
    text = {"vocab_size": max(ids.values()) + 6, "max_position_embeddings": 4096}
    text |= {"pad_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"]} | sizes[
        "text"
    ]
    model = tiny_model(
        5, family == "qwen3", family=family, text=text, vision=sizes.get("vision", {})
    )
    write_toy_files(path)
    if "vision" in sizes:
        for key, token in (
            ("image_token_id", "<|image_pad|>"),
            ("video_token_id", "<|video_pad|>"),
            ("vision_start_token_id", "<|vision_start|>"),
            ("vision_end_token_id", "<|vision_end|>"),
        ):
            setattr(model.config, key, ids[token])
        for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
            written = json.loads((path / name).read_text())
            written["patch_size"] = sizes["vision"]["patch_size"]
            (path / name).write_text(json.dumps(written))
    model.save_pretrained(path)


def engine_of(toy, **settings):
    """An engine on the checkpoint, in float32."""
    from rlinf_vl.engines.sglang.engine import SglangEngine
    from rlinf_vl.engines.sglang.settings import Settings

    made = {"context_length": 512, "max_running": 32, "dtype": torch.float32} | settings
    return SglangEngine(
        Settings(model_path=toy.path, **made),
        toy.family,
        banned=toy.banned,
        pixels=toy.pixels,
        image_tokens=toy.processor.image_tokens,
        request_timeout_s=120,
    )


def drawing(engine, samples, timeout_s=60):
    """Wait until SGLang draws so many samples."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        (load,) = engine.host.manager.load_snapshot_reader.read_all()
        if load.num_running_reqs >= samples:
            return
        time.sleep(0.01)
    raise AssertionError("SGLang does not draw")


def furthest(engine, made, model, requests):
    """The largest difference between the engine's logprobs of what it samples and those of transformers' model."""
    worst = 0.0
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        for sample in completion.samples:
            expected = made.of_tokens(request, sample, request.sampling.temperature, model)
            worst = float(np.maximum(worst, np.abs(sample.logprobs - expected).max()))
    return worst
