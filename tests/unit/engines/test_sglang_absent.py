"""Where SGLang is missing or too old, its engine's module still imports, and the engine says what to install."""

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from tiny import pixels

from rlinf_vl.engines.sglang import machine
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.sglang.settings import Settings
from rlinf_vl.models.families import family_of
from rlinf_vl.models.image_tokens import ImageTokens


@pytest.mark.parametrize(
    ("version", "deterministic", "error", "message"),
    [
        (
            None,
            False,
            ImportError,
            "sglang is not installed here; run 'bash requirements/install.sh --sglang",
        ),
        (
            "0.5.22",
            False,
            ImportError,
            "sglang 0.5.22 is installed here, and 0.5.23 or newer is needed; run 'bash",
        ),
        (None, True, ValueError, "deterministic: true needs a GPU"),
    ],
)
def test_the_error_says_what_to_do(monkeypatch, version, deterministic, error, message):
    def found(name):
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine, "version", found)
    settings = Settings(
        model_path="nowhere", context_length=8, max_running=1, deterministic=deterministic
    )
    with pytest.raises(error, match=message):
        SglangEngine(
            settings,
            family_of("qwen3_vl"),
            banned=np.zeros(8, bool),
            pixels=pixels,
            image_tokens=ImageTokens(1),
        )
