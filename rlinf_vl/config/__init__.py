"""A run's configuration: its typed schema, its loading and its validation."""

from rlinf_vl.config.keys import Key, config_keys
from rlinf_vl.config.load import changed_keys, load_config, parse_config, save_config, with_texts
from rlinf_vl.config.schema import Config

__all__ = [
    "Config",
    "Key",
    "changed_keys",
    "config_keys",
    "load_config",
    "parse_config",
    "save_config",
    "with_texts",
]
