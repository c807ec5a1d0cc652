"""A run's configuration: one typed schema, how it is loaded, and what it refuses."""

from rlinf_vl.config.keys import Key, config_keys
from rlinf_vl.config.load import changed_keys, load_config, save_config
from rlinf_vl.config.placement import placement_slots
from rlinf_vl.config.schema import Config
from rlinf_vl.config.validate import validate_config

__all__ = [
    "Config",
    "Key",
    "changed_keys",
    "config_keys",
    "load_config",
    "placement_slots",
    "save_config",
    "validate_config",
]
