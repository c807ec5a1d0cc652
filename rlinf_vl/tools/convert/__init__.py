"""The conversion of other systems' configs.

`files` reads a config, `convert` converts it by the tables (`tables`, `systems/`), and `render`
writes it as ours. Only `convert-config` imports this room, and `rlinf_vl.config` for an error about
unknown keys.
"""
