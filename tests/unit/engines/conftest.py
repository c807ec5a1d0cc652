import pytest
from tiny import IMAGE_TOKENS, banned, pixels, tiny_model

from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.lora import add_adapters


@pytest.fixture
def engine_of():
    made = []

    def make(max_running=64, family="qwen3_vl", adapters=None, **kwargs):
        model = use_packed_attention(
            tiny_model(family=family, **kwargs.pop("sizes", {})), family_of(family)
        )
        if adapters is not None:
            add_adapters(model, family_of(family), adapters)
        engine = TorchEngine(
            model,
            family_of(family),
            banned=banned(),
            pixels=kwargs.pop("pixels", pixels),
            image_tokens=IMAGE_TOKENS,
            max_running=max_running,
            **kwargs,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
