"""Rules on the keys that ask whether the policy looks: `data.vision_controls`."""

from collections.abc import Iterator

from rlinf_vl.config.schema import Config


def vision_problems(config: Config) -> Iterator[str]:
    """Yield settings with which vision controls would ask nothing."""
    data = config.data
    if not data.vision_controls:
        return
    key = f"data.vision_controls: {', '.join(data.vision_controls)}"
    if repeated := {kind for kind in data.vision_controls if data.vision_controls.count(kind) > 1}:
        yield f"{key}: {', '.join(sorted(repeated))} is named twice; name it once"
    if not data.val_data_paths:
        yield f"{key}: they are asked in validation, and data.val_data_paths is empty; name some"
    if data.blank_images:
        yield f"{key}: data.blank_images=true shows blank images anyway; leave one of them out"
    if data.messages_key is not None:
        yield f"{key}: an sft run computes no split of a gain; leave it out, and use rlinf-vl eval"
