"""The mismatch guard on a real engine and a real trainer: what agrees passes, a blind and a stale engine are named."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import answered

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config import load_config
from rlinf_vl.controller.mismatch import EngineMismatch, Score, judge, pick
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import Processor
from rlinf_vl.packing.planner import plan_micro_batches
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import Group, GroupSummary, Request, SamplingParams

pytestmark = pytest.mark.integration
FAMILY = family_of("qwen3_vl")


@pytest.fixture(scope="module")
def trainer(toy_folder):
    config = load_config("toy-grpo-cpu", [f"rollout.model.model_path={toy_folder}"])
    join_ranks("cpu")
    yield load_trainer(config, str(toy_folder), Mesh.make("cpu"), total_steps=1)
    dist.destroy_process_group()


def sampled_groups(folder, *, blind=False, stale=False) -> list[Group]:
    """Two prompts each with no, one and two images, answered by an engine that may be broken."""
    from rlinf_vl.data.dataset import ProblemDataset

    processor = Processor(folder, FAMILY)
    model = load_model(folder, FAMILY, torch.float32)
    if stale:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    pixels = (lambda image: np.zeros_like(processor.pixels(image))) if blind else processor.pixels
    engine = TorchEngine(
        model,
        FAMILY,
        banned=processor.banned_ids(vocab_size(model)),
        pixels=pixels,
        image_tokens=processor.image_tokens,
        max_running=64,
    )
    dataset, requests = ProblemDataset(["toy"], "val"), []
    for k in range(6):
        images = tuple(dataset[k + i].images[0] for i in range(k // 2))
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        parts.append({"type": "text", "text": "area?"})
        ids, grids = Renderer(processor).prompt([{"role": "user", "content": parts}], images)
        requests.append(
            Request(ids, images, grids, SamplingParams(max_new_tokens=12), (k, k + 100))
        )
    completions = engine.generate(requests)
    engine.close()
    return [
        answered(r, c.samples, str(k))
        for k, (r, c) in enumerate(zip(requests, completions, strict=True))
    ]


def verdict(trainer, groups):
    summaries = [GroupSummary.of(g, placeholder_ids=-1) for g in groups]
    items = pick(summaries)
    assert len(items) == 6
    plan = plan_micro_batches(items, ranks=1, budget=200)
    share = RankMiniBatch(plan.micro_batches[0], plan.run_vision, 1)
    rows = trainer.score(dict(enumerate(groups)), share)
    return judge([Score(summaries[g].images, n, seen, blank) for g, n, seen, blank in rows], "fp32")


def test_a_sound_engine_passes_and_its_images_matter(trainer, toy_folder):
    metrics = verdict(trainer, sampled_groups(toy_folder))
    assert metrics.keys() == {
        f"mismatch/{k}" for k in ("no_image", "one_image", "more_images", "blank_images")
    }
    assert max(metrics[f"mismatch/{k}"] for k in ("no_image", "one_image", "more_images")) < 2e-5
    assert metrics["mismatch/blank_images"] > 5e-3


def test_a_blind_engine_is_called_blind(trainer, toy_folder):
    with pytest.raises(EngineMismatch, match="the engine is blind"):
        verdict(trainer, sampled_groups(toy_folder, blind=True))


def test_an_engine_with_other_weights_is_called_stale(trainer, toy_folder):
    with pytest.raises(EngineMismatch, match="stale"):
        verdict(trainer, sampled_groups(toy_folder, stale=True))
