"""The config of a supervised run (`rlinf-vl sft`): that of a training run, without what only
sampling needs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig, Config, DataConfig
from rlinf_vl.config.validate import Rule, validate_config


def imitation_config(name: str, overrides: Sequence[str], rules: Sequence[Rule]) -> Config:
    """Return the config of a supervised run, which `rules` check.

    Of `algorithm`, the sampling of validations counts alone; schedule, weight sync and mismatch
    guard are those of a run that samples nothing to train on.

    Raises:
        ConfigError: with every problem found.
    """
    config = parse_config(name, overrides)
    set_imitation(config)
    validate_config(config, (imitation_problems, *rules))
    return config


def set_imitation(config: Config) -> None:
    """Make a config that of a supervised run, in place."""
    if config.data.messages_key is None:
        config.data.messages_key = "messages"
    sampled = config.algorithm
    config.algorithm = with_presets(
        AlgorithmConfig(
            loss_type="cross_entropy",
            adv_type="reinforce_plus_plus",  # unused: it is the one that needs no groups
            loss_agg_func="token-mean",
            group_size=1,
            importance_sampling_fix=False,
            sampling_params=sampled.sampling_params,
            val_sampling_params=sampled.val_sampling_params,
        )
    )
    runner = config.runner
    runner.schedule, runner.mismatch_check_interval, runner.weight_sync_interval = "sync", -1, 1
    config.actor.routing_replay = "off"


def as_problems(config: Config) -> Config:
    """Return the config for sampling answers to the validation rows: they are read as problems, not
    as conversations, and no others are read."""
    data = replace(
        config.data,
        messages_key=None,
        sample_val=False,
        train_data_paths=list(config.data.val_data_paths),
        rollout_batch_size=1,
    )
    return replace(config, data=data)


class RowLimit(NamedTuple):
    """The limit on a row's tokens.

    Attributes:
        subject: what of a row is limited: its prompt, or a whole conversation.
        key: the config key of the limit.
        value: tokens.
    """

    subject: str
    key: str
    value: int

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def row_limit(config: Config) -> RowLimit:
    """Return the limit on the rows of a config: of prompts, or of conversations to imitate."""
    if config.data.messages_key is not None:
        return RowLimit("conversation", "runner.seq_length", config.runner.seq_length)
    return RowLimit("prompt", "data.max_prompt_length", config.data.max_prompt_length)


def imitation_problems(config: Config) -> Iterator[str]:
    """Yield settings that conversations can't have."""
    data = config.data
    for key, value, why in (
        ("prompt_suffix", data.prompt_suffix, "a conversation ends with an answer"),
        ("prompt_variants", data.prompt_variants, "a conversation has its questions"),
    ):
        if value:
            yield f"data.{key}: {value!r}, but {why}; leave it out, and write it into the messages"
    if data.overlong == "cut":
        yield (
            "data.overlong: cut would take from what is imitated; set drop or error, and "
            "runner.seq_length for how long a conversation may be"
        )
    if not data.imitate:
        yield "data.imitate: [] leaves nothing to learn; name content, thoughts or calls"
    if data.sample_val and not data.val_data_paths:
        yield "data.sample_val: true without data.val_data_paths samples nothing; name some"


def sampled_problems(config: Config) -> Iterator[str]:
    """Yield settings of `sft` in the config of a run that samples what it trains on."""
    data = config.data
    for key, is_set in (
        ("messages_key", data.messages_key is not None),
        ("imitate", data.imitate != DataConfig().imitate),
        ("sample_val", data.sample_val),
    ):
        if is_set:
            yield (
                f"data.{key}: {str(getattr(data, key)).lower()} is for conversations to imitate, "
                "which another verb trains on: rlinf-vl sft CONFIG; for train, leave it out"
            )
