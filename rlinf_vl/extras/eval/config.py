"""The config of an evaluation, made of a training config: its model, its folder, nothing that only
training needs."""

import os
from collections.abc import Sequence

from omegaconf import OmegaConf

from rlinf_vl.config import Config
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.validate import Rule, validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.export.run_code import refuse_code_of_run
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder, checkpoint_at, config_of, folder_at


def evaluation_config(
    name: str,
    overrides: Sequence[str],
    samples: int,
    rules: Sequence[Rule],
    trust_run_code: bool = False,
) -> tuple[Config, Folder | None]:
    """Return the config of an evaluation, which `rules` check, and its checkpoint, if it has one.

    Args:
        overrides: those of a run, and `checkpoint=DIR` or `model=DIR`.
        trust_run_code: the checkpoint's run may bring Python along that the config does not name
            itself.

    Raises:
        ConfigError: with every problem of the config; or the named checkpoint or model can't be
            evaluated.
    """
    # these two are no config keys: they name the weights to evaluate
    evaluated = dict.fromkeys(("checkpoint", "model"), "")
    config_overrides = []
    for text in overrides:
        key, _, value = text.partition("=")
        evaluated |= {key: os.path.expanduser(value)} if key in evaluated else {}
        config_overrides += [] if key in evaluated else [text]
    config = parse_config(name, config_overrides)
    model, data = config.rollout.model, config.data
    is_named = any(text.startswith("runner.experiment_name=") for text in config_overrides)
    label = config.runner.experiment_name
    if evaluated["checkpoint"] and evaluated["model"]:
        raise ConfigError("checkpoint= and model= name two things to evaluate; give one of them")
    if evaluated["model"]:
        # a name that is no folder is one on the hub
        is_folder = os.path.isdir(evaluated["model"])
        model.model_path = os.path.abspath(evaluated["model"]) if is_folder else evaluated["model"]
        label = f"{config.runner.experiment_name}-{os.path.basename(model.model_path)}"
    sampling = config.algorithm.val_sampling_params
    problems = []
    if samples < 1:
        problems.append(f"--samples {samples}: at least one answer to each problem")
    elif samples > 1 and sampling.temperature == 0:
        problems.append(
            f"--samples {samples}: all answers to a problem would be the same one with "
            "algorithm.val_sampling_params.temperature=0; raise that"
        )
    if not data.val_data_paths:
        problems.append(
            "data.val_data_paths: empty; they are what is evaluated: name a file or folder, "
            "hf://… or seeds://N"
        )
    data.train_data_paths = list(data.val_data_paths)  # training data may be absent
    # answers are sampled, also to the rows of a supervised run
    data.messages_key, data.sample_val = None, False
    data.rollout_batch_size = config.algorithm.n_minibatches = 1
    config.runner.resume_dir = config.runner.checkpoint_dir = None
    config.runner.logger.logger_backends = []
    # a folder of its own, so that the run's files stay as they are
    name = config.runner.experiment_name if is_named else label
    config.runner.experiment_name = f"{name}-eval"
    validate_config(config, (lambda _: iter(problems), *rules))
    if not evaluated["checkpoint"]:
        return config, None
    checkpoint = _checkpoint(folder_at(evaluated["checkpoint"]), model.model_path)
    refuse_code_of_run(
        config_of(checkpoint), checkpoint.parents[1], trust_run_code, evaluated_by=config
    )
    if not is_named:
        step = checkpoint.name.removeprefix("global_")
        config.runner.experiment_name = f"{checkpoint.parents[1].name}-{step}-eval"
    return config, checkpoint


def _checkpoint(source: Folder, model_path: str) -> Folder:
    """Return the complete checkpoint at `source`, of a run that began with the model at
    `model_path`."""
    try:
        folder = checkpoint_at(source).resolve()
    except FileNotFoundError as error:
        raise ConfigError(
            f"checkpoint: {error}; name a run's folder, or its checkpoints/global_step_N"
        ) from None
    config_file = folder.parents[1] / "config.yaml"
    if not config_file.is_file() or not (folder / ACTOR_FOLDER / ".metadata").is_file():
        raise ConfigError(
            f"checkpoint: {folder} lacks {config_file} or its weights; copy the run's folder whole"
        )
    base_model = OmegaConf.select(config_of(folder), "rollout.model.model_path")
    if base_model != model_path:
        raise ConfigError(
            f"checkpoint: {folder} is of a run that began with {base_model}, not with "
            f"rollout.model.model_path={model_path}; set rollout.model.model_path={base_model}, "
            "or name another checkpoint"
        )
    return folder
