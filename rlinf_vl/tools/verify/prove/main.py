"""The verb `prove-family`: proves the paths of a checkpoint's family, and shows the outcomes."""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.errors import ConfigError, nearest
from rlinf_vl.models.families import FAMILIES, family_at, family_of
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import folder_without_weights
from rlinf_vl.tools.verify.prove.certificate import (
    Outcome,
    add_to_certificate,
    outcomes_of,
    write_certificate,
)
from rlinf_vl.tools.verify.prove.member import Member, member_of, member_with
from rlinf_vl.tools.verify.prove.proofs import Proofs
from rlinf_vl.user_code import CodeError, is_code

#: GLM's checkpoints rotate half of a head of 128, in sections of time, height and width.
GLM_ROTATION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [8, 12, 12],
}
#: Settings of released checkpoints, of model types whose default config can't encode an image,
#: rotates otherwise than its own class, or has a padding token beyond its vocabulary.
RELEASED = {
    "glm46v": {"text_config": {"rope_parameters": GLM_ROTATION}},
    "glm4v": {"text_config": {"rope_parameters": GLM_ROTATION}},
    "glm4v_moe": {"text_config": {"rope_parameters": GLM_ROTATION, "head_dim": 128}},
    "glmga": {"text_config": {"rope_parameters": GLM_ROTATION}},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "idefics3": {"text_config": {"vocab_size": 128259}},
    "smolvlm": {"pad_token_id": 2},
}
STYLES = {"proven": "green", "wrong": "bold red", "refused": "yellow"}


def main(arguments: argparse.Namespace) -> int:
    """Prove a family; return 0 unless a path is wrong, else 1.

    Raises:
        ConfigError: the checkpoint or its family can't be found, or a path is unknown.
    """
    disable_progress_bar()
    console = Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    try:
        certificate = _certificate_to_extend(arguments)
        config = (
            AutoConfig.for_model(**certificate["member"])
            if certificate
            else _config_of(arguments.checkpoint)
        )
        files = _files_of(arguments.checkpoint)
        with _image_processor_folder(files) as folder:
            tokenizer_folder = files if files and _has_tokenizer(files) else None
            family = _family(arguments, config, tokenizer_folder)
            make = member_with if certificate else member_of
            member = _member(make, family, config, folder)
            proofs = Proofs(member, tokenizer_folder)
            chosen = _chosen_paths(arguments.paths, proofs)
            outcomes: list[Outcome] = []
            for outcome in outcomes_of(proofs, chosen.__contains__):
                outcomes.append(outcome)
                mark = f"[{STYLES[outcome.status]}]{outcome.status}[/]"
                print(f"{len(outcomes)}/{len(chosen)} {outcome.path}", file=sys.stderr)
                if outcome.reason and outcome.status == "wrong":
                    console.print(f"{mark} {outcome.path}: {escape(outcome.reason)}")
    finally:
        torch.set_num_threads(threads)
    console.print(_table(config.model_type, outcomes))
    if arguments.output is not None:
        file, settings = Path(arguments.output), proofs.member.config.to_dict()
        if certificate is None:
            write_certificate(file, arguments.checkpoint, settings, outcomes)
        else:
            add_to_certificate(file, list(proofs.paths), settings, outcomes)
        console.print(f"the certificate is in {file}")
    wrong = [outcome.path for outcome in outcomes if outcome.status == "wrong"]
    if wrong:
        console.print(f"{config.model_type} is not computed as in transformers: {', '.join(wrong)}")
    return 1 if wrong else 0


def _certificate_to_extend(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the certificate that gets the chosen paths: one that is there and has the others.

    Raises:
        ConfigError: it is of another model.
    """
    if arguments.paths is None or arguments.output is None or not Path(arguments.output).is_file():
        return None
    try:
        content = json.loads(Path(arguments.output).read_text("utf-8"))
        checkpoint = content["checkpoint"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--output {arguments.output!r} is no certificate: {error!r}") from error
    if checkpoint != arguments.checkpoint:
        raise ConfigError(
            f"--output {arguments.output!r} is the certificate of {checkpoint!r}; name another file"
        )
    return content


def _files_of(checkpoint: str) -> Path | None:
    """Return the folder of the checkpoint's small files, None for a model type."""
    if Path(checkpoint).exists():
        return Path(checkpoint)
    return folder_without_weights(checkpoint) if "/" in checkpoint else None


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))


@contextmanager
def _image_processor_folder(files: Path | None) -> Iterator[Path]:
    """Yield the folder of the image processor: the checkpoint's, else an empty one."""
    if files and (files / "preprocessor_config.json").is_file():
        yield files
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _config_of(checkpoint: str) -> PretrainedConfig:
    """Return transformers' config of a folder, of a model on the hub, or of a model type."""
    if Path(checkpoint).exists() or "/" in checkpoint:
        try:
            return AutoConfig.from_pretrained(checkpoint)
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {checkpoint!r}: {error}") from error
    try:
        return AutoConfig.for_model(checkpoint, **copy.deepcopy(RELEASED.get(checkpoint, {})))
    except ValueError:
        raise ConfigError(
            f"checkpoint {checkpoint!r}: no folder, and transformers has no such model type;"
            f"{nearest(checkpoint, FAMILIES)}"
        ) from None


def _family(
    arguments: argparse.Namespace, config: PretrainedConfig, tokenizer_folder: Path | None
) -> Family:
    """Return the family that the arguments name, or else that of the config."""
    checkpoint = tokenizer_folder or ""  # without a tokenizer, image tokens have no texts
    paths = arguments.vision_tower, arguments.text_model  # of `family_at`
    if any(paths) and not all(paths):
        raise ConfigError("--vision-tower and --text-model go together")
    if arguments.family and any(paths):
        raise ConfigError("--family and --vision-tower name two families")
    try:
        if all(paths):
            return family_at(config, paths, checkpoint)
        if arguments.family and not is_code(arguments.family):
            raise ConfigError(
                f"--family {arguments.family!r}: a family of your own is path/to/file.py:NAME"
            )
        if arguments.family:
            return family_of(arguments.family)
        return family_at(config, None, checkpoint)
    except (ValueError, CodeError) as error:
        raise ConfigError(str(error)) from error


def _member(
    make: Callable[..., Member], family: Family, config: PretrainedConfig, folder: Path
) -> Member:
    """Return `member_of` or `member_with` these.

    Raises:
        ConfigError: the config has no small sizes.
    """
    try:
        return make(family, config, folder)
    except Exception as error:  # transformers checks configs in many ways
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"no tiny member of {config.model_type} can be made: {text}") from error


def _chosen_paths(names: str | None, proofs: Proofs) -> list[str]:
    """Return the chosen paths in the order of the proofs: all, if none is named."""
    if names is None:
        return list(proofs.paths)
    chosen = [name.strip().replace("_", " ") for name in names.split(",")]
    for name in chosen:
        if name not in proofs.paths:
            raise ConfigError(
                f"--paths {name!r}: no such path;{nearest(name, proofs.paths)} there are "
                f"{', '.join(proofs.paths)}"
            )
    return [path for path in proofs.paths if path in chosen]


def _table(model_type: str, outcomes: list[Outcome]) -> Table:
    """Return the outcomes as a table for the terminal."""
    table = Table("path", "largest differences", "limit", "outcome", title=model_type)
    for outcome in outcomes:
        figures = " / ".join(f"{value:.1e}" for value in outcome.figures)
        table.add_row(
            outcome.path,
            figures,
            f"{outcome.limit:.0e}" if outcome.figures else "",
            f"[{STYLES[outcome.status]}]{outcome.status}[/]"
            + (f": {escape(outcome.reason)}" if outcome.status == "refused" else ""),
        )
    return table
