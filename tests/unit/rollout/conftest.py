from types import SimpleNamespace

import pytest
import torch

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor


def on_the_engine(folder, model_type):
    """A toy's model on the embedded engine, in float32."""
    family = family_of(model_type)
    processor = Processor(folder, family)
    model = load_model(folder, family, torch.float32)
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.data.uniform_(-3, 0)  # states that reach far
    banned, pixels = processor.banned_ids(vocab_size(model)), PixelCache(processor.pixels)
    places = {"image_tokens": processor.image_tokens}
    engine = TorchEngine(model, family, banned=banned, pixels=pixels, max_running=64, **places)
    yield SimpleNamespace(
        processor=processor, model=model, banned=banned, pixels=pixels, engine=engine
    )
    engine.close()


@pytest.fixture(scope="module")
def toy(toy_folder):
    yield from on_the_engine(toy_folder, "qwen3_vl")


@pytest.fixture(scope="module")
def recurrent_toy(tmp_path_factory):
    """The one with gated delta nets, whose rows have states."""
    folder = tmp_path_factory.mktemp("recurrent") / "checkpoint"
    build_toy_checkpoint(folder, progress=False, toy="toy-qwen3_5", steps=1)
    yield from on_the_engine(folder, "qwen3_5")
