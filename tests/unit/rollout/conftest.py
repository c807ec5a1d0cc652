from types import SimpleNamespace

import pytest
import torch

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model, vocab_size
from rlinf_vl.models.processing import PixelCache, Processor


@pytest.fixture(scope="module")
def toy(toy_folder):
    """The toy's model on the embedded engine, in float32."""
    family = family_of("qwen3_vl")
    processor = Processor(toy_folder, family)
    model = load_model(toy_folder, family, torch.float32)
    banned, pixels = processor.banned_ids(vocab_size(model)), PixelCache(processor.pixels)
    places = {"image_token_id": processor.image_token_id, "merge_size": processor.merge_size}
    engine = TorchEngine(model, family, banned=banned, pixels=pixels, max_running=64, **places)
    yield SimpleNamespace(processor=processor, model=model, banned=banned, pixels=pixels, engine=engine)
    engine.close()
