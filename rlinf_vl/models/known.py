"""The transformers config of a model that may not be on this machine yet."""

import copy
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError

#: config.json of common hub models, with the keys that decide on memory.
KNOWN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text()
)


def model_config(path: str, *, trust_remote_code: bool = False) -> tuple[PretrainedConfig, str]:
    """Return the transformers config of the model at `path`, and where it is from.

    Nothing is downloaded.

    Raises:
        ConfigError: there is no such folder, the hub's cache has none of that name, and neither has
            `KNOWN`.
    """
    if path in TOYS:
        return load_part("toy-config")(path), "the toy's own"
    try:
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return config, "its config.json" if Path(path).is_dir() else "the hub's cache"
    except (OSError, ValueError) as error:
        # Thinking and Instruct models have the same shape.
        table_config = KNOWN.get(path.replace("-Thinking", "-Instruct"))
        if table_config is None:
            raise ConfigError(
                f"rollout.model.model_path: no config.json at {path!r}, in the folder or the hub's "
                f"cache; fetch it with 'hf download {path} config.json', or name a folder"
            ) from error
    return AutoConfig.for_model(
        **copy.deepcopy(table_config)
    ), "a table in rlinf_vl (not downloaded yet)"
