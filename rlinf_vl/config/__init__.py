"""A run's configuration: one typed schema, how it is loaded, and what it refuses."""

from rlinf_vl.config.keys import Key, config_keys
from rlinf_vl.config.load import changed_keys, load_config, parse_config, save_config, with_texts
from rlinf_vl.config.schema import Config

__all__ = ["Config", "Key", "changed_keys", "config_keys", "load_config", "parse_config", "save_config", "with_texts"]
