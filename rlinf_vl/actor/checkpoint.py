"""What a rank writes and reads: model and optimizer through torch.distributed.checkpoint, which reshards on load."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Write the sharded state under `folder`. Collective."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Read what `save` wrote, on any number of ranks. Collective."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def load_weights_only(folder: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a plain transformers model, without process groups (for export)."""
    state = {"model": {f"model.{name}": value for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
