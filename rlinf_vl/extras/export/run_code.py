"""Python that a run's folder brings along, and the consent that it takes to run it.

A run's `config.yaml` holds the text of its user's files (`runner.code_files`). Loading the run's
model executes the family that `rollout.model.model_type` names, and with
`rollout.model.trust_remote_code` the Python files of the base model. Whoever reads a folder
(`export`, `eval checkpoint=`, `load_policy`) may have it from somebody else, so neither happens
without consent.
"""

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.user_code import CodeError, is_code
from rlinf_vl.user_code.texts import located

OPTION = "--trust-run-code"


def code_of_run(config: DictConfig) -> list[str]:
    """List the code that loading the model of a run with this config would execute, each as key,
    name and origin."""
    executed = []
    name = OmegaConf.select(config, "rollout.model.model_type") or ""
    if is_code(name):
        origin = (
            "runner.code_files"
            if _texts_beside(name, _code_files(config))
            else "a module or file of this machine"
        )
        executed.append(f"rollout.model.model_type names {name!r} ({origin})")
    if OmegaConf.select(config, "rollout.model.trust_remote_code"):
        base = OmegaConf.select(config, "rollout.model.model_path")
        executed.append(f"rollout.model.trust_remote_code is true (the Python files of {base})")
    return executed


def refuse_code_of_run(
    config: DictConfig, folder: Any, trusted: bool, evaluated_by: Config | None = None
) -> None:
    """Refuse to load the model of a run whose folder brings Python along, unless that is trusted.

    Args:
        config: the one in the run's folder.
        folder: the run's folder, for the message.
        evaluated_by: the config of an evaluation. Code that it names itself, with the same texts,
            is its user's own.

    Raises:
        ConfigError: names what would be executed, and the option that allows it.
    """
    if trusted or not (executed := code_of_run(config)):
        return
    if evaluated_by is not None and _names_same_code(config, evaluated_by):
        return
    raise ConfigError(
        f"{folder}/config.yaml brings Python along that loading this model would run: "
        f"{'; '.join(executed)}. If it is yours, or you have read it and trust it, add {OPTION} "
        "(in Python: trust_run_code=True)"
    )


def _names_same_code(config: DictConfig, users_config: Config) -> bool:
    """Return whether a user's own config names the same code, with the same texts, as that of a
    run's folder."""
    run_model, model = OmegaConf.select(config, "rollout.model"), users_config.rollout.model
    if run_model.get("trust_remote_code") and not (
        model.trust_remote_code and model.model_path == run_model.model_path
    ):
        return False
    name = run_model.get("model_type") or ""
    if not is_code(name):
        return True
    texts = _texts_beside(name, _code_files(config))
    return name == model.model_type and texts == _texts_beside(name, users_config.runner.code_files)


def _code_files(config: DictConfig) -> dict[str, str]:
    return dict(OmegaConf.select(config, "runner.code_files") or {})


def _texts_beside(name: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the file that a name leads to, and of those that it can import from its
    folder."""
    place = name.rpartition(":")[0]
    path = place
    if place.endswith(".py"):
        try:
            # As loading does, so that the texts are those that it would execute.
            path = located(os.path.expanduser(place), [os.getcwd()], files)
        except CodeError:  # the paths of several files end so, and loading refuses it
            return {}
    if path not in files:
        return {}
    folder = os.path.dirname(path)
    return {
        file: text
        for file, text in files.items()
        if file == path or folder and file.startswith(f"{folder}/")
    }
