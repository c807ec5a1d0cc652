"""Former keys: refused with what to do instead, unless they have the value that is now fixed."""

import re

import pytest
import yaml
from omegaconf import OmegaConf

from rlinf_vl.config import config_keys, parse_config, save_config
from rlinf_vl.config.keys import config_sections, suggestion
from rlinf_vl.config.removed import REMOVED, SERVER_ARGS
from rlinf_vl.errors import ConfigError

TOY = "toy-grpo-cpu"


@pytest.fixture(scope="module")
def problems():
    """The problems of a config in which every former key has another value than it had."""
    with pytest.raises(ConfigError) as caught:
        parse_config(TOY, [(key, "other") for key in REMOVED.keys() - SERVER_ARGS.keys()])
    return caught.value.problems


@pytest.mark.parametrize("key", REMOVED)
def test_a_former_key_is_refused_with_what_to_do(key, problems):
    hint = REMOVED[key].hint
    assert key in SERVER_ARGS or f"{key}: 'other' is no longer read: {hint}" in problems
    assert hint in suggestion(key) and key not in config_keys()
    # A hint leads to keys that there are.
    sections = "|".join(name for name in config_sections() if "." not in name)
    for named in re.findall(rf"\b(?:{sections})\.\w+(?:\.\w+)*", hint):
        assert named.startswith("rollout.sglang.server_args") or named in {
            *config_keys(),
            *config_sections(),
        }


def test_the_config_of_an_old_run_loads_where_former_keys_have_their_defaults(tmp_path):
    config = parse_config(TOY)
    file = tmp_path / "config.yaml"
    save_config(config, file)
    old = OmegaConf.load(file)
    for key, (default, _) in REMOVED.items():
        OmegaConf.update(old, key, default)
    file.write_text(OmegaConf.to_yaml(old), encoding="utf-8")
    assert set(yaml.safe_load(file.read_text())["runner"]) >= {"max_restarts", "max_bad_steps"}
    assert parse_config(str(file)) == config


def test_former_keys_of_sglangs_arguments_are_moved_there():
    """As older configs and command lines have them; an entry of today's wins."""
    former = ["rollout.sglang.log_level=info", "rollout.sglang.ep_size=2"]
    today = ["rollout.sglang.server_args={sampling_backend: pytorch, ep_size: 4}"]
    config = parse_config(TOY, [*former, *today])
    expected = {"sampling_backend": "pytorch", "ep_size": 4, "log_level": "info"}
    assert config.rollout.sglang.server_args == expected
    assert config.rollout.sglang.ep_size == 4
