"""What a rank writes and reads: model and optimizer through torch.distributed.checkpoint, which reshards on load."""

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlinf_vl.errors import RunError
from rlinf_vl.models.lora import is_adapter


def save(
    folder: Path, rank: int, policy: nn.Module, optimizer: torch.optim.Optimizer, *, trained_only: bool = False
) -> None:
    """Write the sharded state, and this rank's random states, under `folder`; OSError if some rank can't. Collective. The learning
    rate is not part of it: it follows from the config and the step. `trained_only`: without weights that are not trained."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    if trained_only:
        model_state = {name: model_state[name] for name, p in policy.named_parameters() if p.requires_grad}
    random = {"cpu": torch.get_rng_state()}  # torch's generators are the only ones that training may draw from
    if torch.cuda.is_available():
        random["cuda"] = torch.cuda.get_rng_state()
    torch.save(random, folder / f"random-{rank}.pt")
    try:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    except CheckpointException as error:  # not an Exception, and it contains tracebacks
        raise OSError(next(str(reason) for reason, _ in error.failures.values())) from None


def load(folder: Path, rank: int, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save` wrote, on any number of ranks; a rank that did not exist then keeps its random states. Collective.

    Of the optimizer, its moments are read; its settings (learning rate, weight decay, …) stay those of the config. A weight that
    was frozen when the checkpoint was written, and is trained now, starts without moments. A checkpoint of adapters leaves the
    weights below them as they are.

    Raises:
        RunError: the checkpoint has other adapters, or none.
    """
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {name.removeprefix("model.") for name in known if name.startswith("model.")}
    trained = {name: tuple(p.shape) for name, p in policy.named_parameters() if p.requires_grad}
    others = [n for n, shape in trained.items() if tuple(getattr(known.get(f"model.{n}"), "size", ())) != shape]
    if others or any(is_adapter(name) and name not in trained for name in saved):
        raise RunError(
            f"runner.resume_dir: the checkpoint at {folder.parent} was written with other adapters ({(others or ['more'])[0]} …); "
            "set actor.model.is_lora and actor.model.lora to what its run's config.yaml says, or start afresh"
        )
    model_state = {name: value for name, value in model_state.items() if name in saved}
    moments = optimizer_state["state"]
    assert isinstance(moments, dict)
    state = {name: value for name, value in moments.items() if f"optimizer.state.{name}.step" in known}
    dcp.load({"model": model_state, "optimizer": {"state": state}}, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(strict=False),
    )
    for name, param in policy.named_parameters():
        if name in moments and name not in state:
            del optimizer.state[param]
    if (random := folder / f"random-{rank}.pt").exists():
        states = torch.load(random)
        torch.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


def load_weights_only(folder: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a transformers model, without process groups (for export). Those below adapters stay as
    they are where the checkpoint lacks them. OSError if they are damaged, or another model's."""
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    if any(map(is_adapter, weights)):
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        weights = {n: value for n, value in weights.items() if is_adapter(n) or f"model.{n}" in saved}
    state = {"model": weights}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what is meant
            dcp.load(state, checkpoint_id=folder, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    except CheckpointException as error:  # as in `save`
        raise OSError(f"{folder}: {next(str(reason) for reason, _ in error.failures.values())}") from None
