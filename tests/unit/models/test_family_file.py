"""A family is one file: put into a copy of the package, it goes from config to export with nothing else changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlinf_vl

PACKAGE = Path(rlinf_vl.__file__).parent

#: Its positions count tokens, and layers but the attention compute as transformers writes them.
FAMILY_FILE = '''
"""A family of a test: Qwen3-VL whose positions count tokens, also those of images."""

from dataclasses import replace

import numpy as np

from rlinf_vl.models.families.qwen3_vl import FAMILY as QWEN3_VL


def layers():
    from rlinf_vl.models.layers import attention_forward

    return {"Qwen3VLTextAttention": attention_forward}


def plain_positions(ids, grids, image_tokens):
    assert (ids == image_tokens.id).sum() == image_tokens(grids).sum()
    return np.tile(np.arange(len(ids)), (4, 1))


def engine_limits(config, on_cpu):
    yield "it has never heard of it"


FAMILY = replace(
    QWEN3_VL,
    model_type="plain_vl",
    layers=layers,
    positions=plain_positions,
    engine_limits=engine_limits,
    float32_weights=("bias",),
)
'''

WALK = '''
"""From a checkpoint of that family to a prompt, samples, a packed row and an export, against transformers."""

import io
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig
from transformers import Qwen3VLForConditionalGeneration

from rlinf_vl.config import load_config
from rlinf_vl.config.keys import config_keys
from rlinf_vl.extras.export.export import copy_processor_files
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.saving import save_model
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.tools.check.checkpoint import checkpoint
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.extras.toy.files import write_toy_files
from rlinf_vl.extras.toy.model import toy_config
from rlinf_vl.extras.toy.task import toy_of
from rlinf_vl.types import Group, ImageRef, Request, SamplingParams, TokenSequence, Trajectory, Turn


class PlainConfig(Qwen3VLConfig):
    model_type = "plain_vl"


class PlainModel(Qwen3VLForConditionalGeneration):
    """The family in transformers, which would come with it."""

    config_class = PlainConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.get_rope_index = self.positions

    def positions(self, input_ids, **_):
        counted = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
        return counted, torch.zeros(len(input_ids), 1, dtype=torch.int64)


AutoConfig.register("plain_vl", PlainConfig)
AutoModelForImageTextToText.register(PlainConfig, PlainModel)

folder, export = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir()
toy = toy_of("toy")
write_toy_files(folder, toy.words)
torch.manual_seed(0)
made = toy_config(toy).to_dict() | {"model_type": "plain_vl"}
theirs = PlainModel(PlainConfig(**made)).eval()
for p in theirs.parameters():
    p.data += 0.05 * torch.randn_like(p)
family = family_of("plain_vl")
save_model(theirs, family, folder)

# The config allows it, preflight finds nothing wrong, and SGLang's limits are told.
assert "plain_vl" in config_keys()["rollout.model.model_type"].allowed
keys = [f"rollout.model.model_path={folder}", "rollout.model.model_type=plain_vl"]
config = load_config("toy-grpo-cpu", keys)
assert not list(checkpoint(config)), list(checkpoint(config))
config.rollout.rollout_backend = "sglang"
(refusal,) = checkpoint(config)
assert "SGLang can't run this plain_vl: it has never heard of it; set rollout" in refusal, refusal

# Prompts of two images, of one and of none.
assert family_of("auto", folder) is family
processor = Processor(folder, family)
renderer, random = Renderer(processor), np.random.default_rng(0)
model = load_model(folder, family, torch.bfloat16)
assert {p.dtype for n, p in model.named_parameters() if n.endswith(".bias")} == {torch.float32}
model = load_model(folder, family, torch.float32)
banned, pixels = processor.banned_ids(vocab_size(model)), PixelCache(processor.pixels)
engine = TorchEngine(
    model, family, banned=banned, pixels=pixels, image_tokens=processor.image_tokens, max_running=8
)
requests = []
for sizes in ([(48, 64), (32, 80)], [(64, 64)], []):
    images = []
    for size in sizes:
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(buffer, "PNG")
        images.append(ImageRef.of(buffer.getvalue()))
    parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "how large?"}]}]
    ids, grids = renderer.prompt(messages, images)
    assert (ids == processor.image_tokens.id).sum() == processor.image_tokens(grids).sum()
    sampling = SamplingParams(max_new_tokens=12)
    requests.append(Request(ids, tuple(images), grids, sampling, (0, 1)))

# Samples of the engine, in one packed row that shares prompts.
groups = []
for number, (request, completion) in enumerate(zip(requests, engine.generate(requests), strict=True)):
    trajectories = []
    for sample in completion.samples:
        sequence = TokenSequence.of_sample(request, sample)
        turn = Turn(0, len(request.ids), len(sequence.ids), sample.finish_reason, 0.0)
        trajectories.append(Trajectory((sequence,), (turn,), 0.0, {}, sample.finish_reason))
    groups.append(Group(str(number), str(number), len(request.ids), tuple(trajectories)))
engine.close()
members = [Member(g, i, [0.0]) for g in groups for i in range(2)]
collate = Collator(family, processor.image_tokens, pixels, processor.pad_id)
batch = collate(members, run_vision=True)
policy = PolicyModel(load_model(folder, family, torch.float32), family, banned, temperature=1.0, chunk=None)
save_model(policy.model, family, export)
copy_processor_files(folder, export)
exported = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32).eval()
with torch.no_grad():
    packed, _ = policy(batch)
    torch.testing.assert_close(packed, torch.from_numpy(batch.rollout_logprobs), atol=2e-5, rtol=0)
    expected = {theirs: [], exported: []}
    for member in members:
        (sequence,) = member.trajectory.sequences
        ids = torch.from_numpy(sequence.ids.astype(np.int64))[None]
        inputs = {}
        if sequence.images:
            patches = np.concatenate([pixels(image) for image, _ in sequence.images])
            inputs = {
                "pixel_values": torch.from_numpy(patches),
                "image_grid_thw": torch.tensor([grid for _, grid in sequence.images]),
                "mm_token_type_ids": (ids == processor.image_tokens.id).int(),
            }
        sampled = torch.from_numpy(np.flatnonzero(sequence.loss_mask))
        for reference, logprobs in expected.items():
            logits = reference(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
            logits[:, torch.from_numpy(banned)] = -torch.inf
            logprobs.append(logits.log_softmax(-1)[sampled - 1, ids[0, sampled]])
for logprobs in expected.values():
    torch.testing.assert_close(packed, torch.cat(logprobs), atol=2e-5, rtol=0)
'''


@pytest.mark.slow
def test_a_family_is_added_by_one_file(tmp_path):
    shutil.copytree(
        PACKAGE, tmp_path / "copy/rlinf_vl", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "copy/examples").symlink_to(PACKAGE.parent / "examples")
    (tmp_path / "copy/rlinf_vl/models/families/plain_vl.py").write_text(FAMILY_FILE)
    (tmp_path / "walk.py").write_text(WALK)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "copy")}
    command = [sys.executable, "walk.py", "checkpoint", "export"]
    walk = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert walk.returncode == 0, walk.stdout + walk.stderr
