"""Presets: values from its paper that an advantage, a loss or a KL penalty gives to `algorithm.*`
keys that are null.

docs/algorithms.md has the papers. A value in the config stays, with one exception: an override that
chooses another algorithm also replaces the YAML's values of these keys, so that one override gives
an algorithm as published.
"""

from typing import Any

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.schema import AlgorithmConfig

#: Keys of the clips; a loss sets those that it does not read to null.
CLIPS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def _of_losses() -> dict[str, dict[str, Any]]:
    presets = {}
    for name, loss in built_ins("losses").items():
        unread_clips = dict.fromkeys(clip for clip in CLIPS if clip not in loss.clips)
        presets[name] = unread_clips | loss.defaults
    return presets


#: Key of `algorithm` → its value → other keys of `algorithm` and their values. User code has no
#: presets.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "loss_type": _of_losses(),
    "adv_type": {name: dict(kind.defaults) for name, kind in built_ins("estimators").items()},
    "recompute_logprobs": {"false": {"old_policy": "sampler"}},
    "kl_placement": {"loss": {"kl_penalty_type": "k3"}, "reward": {"kl_penalty_type": "k1"}},
}
_DEFAULTS = {
    "old_policy": "start",
    "normalize_advantages": True,
    "loss_agg_func": "token-mean",
    "kl_penalty_type": "k3",
}
#: Level of `algorithm.rejection` → its bounds: those of IcePop, of masked importance sampling, and
#: of its geometric mean.
REJECTION_BOUNDS = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.999, 1.001)}
_CLIP_OF_CODE = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


def with_presets(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Fill the keys that are null, in place; those of `loss_type` come before those of
    `adv_type`."""
    presets = [values.get(getattr(algorithm, key), {}) for key, values in PRESETS.items()]
    # The first value for a key wins, because later presets find it set.
    for preset in (
        *presets,
        _DEFAULTS,
        {} if algorithm.loss_type in PRESETS["loss_type"] else _CLIP_OF_CODE,
    ):
        for name, value in preset.items():
            if getattr(algorithm, name) is None:
                setattr(algorithm, name, value)
    rejection = algorithm.rejection
    low, high = REJECTION_BOUNDS.get(rejection.level or "", (None, None))
    rejection.low = low if rejection.low is None else rejection.low
    rejection.high = high if rejection.high is None else rejection.high
    return algorithm
