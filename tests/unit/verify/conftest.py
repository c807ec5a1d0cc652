import pytest
from recorded_step import recorded_step, tiny_groups, tiny_run, tiny_subject


@pytest.fixture(scope="session")
def clean_step():
    """A sound run's step of a tiny Qwen3-VL in float32."""
    return recorded_step(tiny_subject(), tiny_run(), tiny_groups())
