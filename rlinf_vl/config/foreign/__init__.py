"""The conversion of other systems' configs.

`files` reads a config, `convert` converts it, and `render` writes it as ours.
"""
