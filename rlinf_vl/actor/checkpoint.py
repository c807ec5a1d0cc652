"""Save and load a rank's model and optimizer with torch.distributed.checkpoint, which reshards.

A save has two halves. `CheckpointWriter.stage` copies this rank's state to host memory while
nothing trains; `write` writes the copy, in any thread, while training goes on.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import IOBase
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlinf_vl.actor.staging_arena import ArenaStager
from rlinf_vl.errors import RunError
from rlinf_vl.models.lora import is_adapter


class CheckpointWriter:
    """The writer of one rank's checkpoints, one at a time; both methods are collective."""

    _state: dict[str, Any]  # the copy that `stage` made, for `write`
    _random: dict[str, torch.Tensor]  # states of torch's generators, by device

    def __init__(self) -> None:
        # A group of its own: in the default group, collectives of the writing thread would be
        # matched with those of training.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        on_gpu = torch.cuda.is_available()
        self._on_gpu = on_gpu
        self._stager = ArenaStager(page_locked=on_gpu)

    def stage(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, *, trained_only: bool = False
    ) -> None:
        """Copy the sharded state, and this rank's random states, to host memory.

        The learning rate is not part of it: it follows from the config and the step.
        `trained_only`: without weights that are not trained.
        """
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        if trained_only:
            model_state = {
                name: model_state[name] for name, p in policy.named_parameters() if p.requires_grad
            }
        # torch's generators are the only ones that training may draw from.
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        self._random = random
        state = {"model": model_state, "optimizer": optimizer_state}
        self._state = self._stager.stage(state, non_blocking=self._on_gpu)

    def write(self, folder: str) -> dict[str, str]:
        """Write the staged state under a folder or URL.

        Returns:
            The SHA-256 of each file that this rank wrote, by its name in the folder.

        Raises:
            OSError: a rank can't write.
        """
        writer = FsspecWriter(folder, sync_files="://" not in folder, per_thread_copy_ahead=0)
        writer.fs = files = _HashedFiles()
        writer.path = files.init_path(folder)
        try:
            with files.create_stream(f"{folder}/random-{dist.get_rank()}.pt", "wb") as file:
                torch.save(self._random, file)
            dcp.save(self._state, storage_writer=writer, process_group=self._group)  # pyright: ignore[reportPrivateImportUsage]
        except CheckpointException as error:  # not an Exception, and it contains tracebacks
            raise OSError(next(str(reason) for reason, _ in error.failures.values())) from None
        return files.digests


class _HashedFiles(FileSystem):
    """Files wherever fsspec reaches, which hash the bytes that are written.

    The digest is taken on the way to the disk: one of the bytes read back would not show that the
    disk had changed them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, str] = {}  # by the name in the folder

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashed = _Hashed(stream)
            yield hashed
        self.digests[_name(path)] = hashed.digest.hexdigest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        # torch writes its metadata under a temporary name first.
        self.digests[_name(new_path)] = self.digests.pop(_name(path))


class _Hashed:
    """A stream that is written from its beginning to its end, and hashed."""

    def __init__(self, stream: IOBase) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._stream.write(data)  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _name(path: Any) -> str:
    return str(path).rsplit("/", 1)[-1]


def load(folder: str, rank: int, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint of `CheckpointWriter`, on any number of ranks. Collective.

    A rank that the writing run did not have keeps its random states. Of the optimizer, the moments
    are read; its settings (learning rate, weight decay, …) stay those of the config. A weight that
    was frozen when the checkpoint was written, and is trained now, starts without moments. A
    checkpoint of adapters leaves the weights below them as they are.

    Raises:
        RunError: the checkpoint has other adapters, or none.
    """
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    stored = FsspecReader(folder).read_metadata().state_dict_metadata
    saved_weights = {name.removeprefix("model.") for name in stored if name.startswith("model.")}
    trained_shapes = {
        name: tuple(p.shape) for name, p in policy.named_parameters() if p.requires_grad
    }
    mismatched = [
        n
        for n, shape in trained_shapes.items()
        if tuple(getattr(stored.get(f"model.{n}"), "size", ())) != shape
    ]
    if mismatched or any(is_adapter(name) and name not in trained_shapes for name in saved_weights):
        raise RunError(
            f"runner.resume_dir: the checkpoint {folder} was written with other adapters "
            f"({(mismatched or ['more'])[0]} …); set actor.model.is_lora and actor.model.lora to "
            "what its run's config.yaml says, or start afresh"
        )
    model_state = {name: value for name, value in model_state.items() if name in saved_weights}
    moments = optimizer_state["state"]
    assert isinstance(moments, dict)
    state = {
        name: value for name, value in moments.items() if f"optimizer.state.{name}.step" in stored
    }
    checkpoint_state = {"model": model_state, "optimizer": {"state": state}}
    reader = FsspecReader(folder)
    dcp.load(checkpoint_state, storage_reader=reader)  # pyright: ignore[reportPrivateImportUsage]
    set_state_dict(
        policy,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(strict=False),
    )
    # `get_state_dict` made moments of every trained weight by a step with gradients of zero. Where
    # the checkpoint has none they must go: AdamW's bias correction would count that step.
    for name, param in policy.named_parameters():
        if name in moments and name not in state:
            del optimizer.state[param]
    files = FileSystem()
    if files.init_path(random_path := f"{folder}/random-{rank}.pt") and files.exists(random_path):
        with files.create_stream(random_path, "rb") as file:
            states = torch.load(file)  # pyright: ignore[reportArgumentType]
        torch.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


class WeightReader:
    """Reads weights of a checkpoint by name, without process groups. Exports use it.

    Attributes:
        names: of the weights that the checkpoint has.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._reader = _ReaderOfOneCheckpoint(folder)
        stored = self._reader.read_metadata().state_dict_metadata
        self.names = {
            n.removeprefix("model.model.") for n in stored if n.startswith("model.model.")
        }

    def read(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite these tensors, each by the weight of its name.

        Raises:
            OSError: the weights are damaged, or another model's.
        """
        state = {"model": {f"model.{name}": value for name, value in weights.items()}}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
                dcp.load(state, storage_reader=self._reader, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
        except CheckpointException as error:  # as in `write`
            reason = next(str(reason) for reason, _ in error.failures.values())
            raise OSError(f"{self._folder}: {reason}") from None


class _ReaderOfOneCheckpoint(FsspecReader):
    """A reader that reads the metadata once, however often weights are read."""

    _read_metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read_metadata is None:
            self._read_metadata = super().read_metadata(*args, **kwargs)
        return self._read_metadata


def load_weights_only(folder: str, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a transformers model, without process groups.

    Weights below adapters stay as they are where the checkpoint lacks them.

    Raises:
        OSError: the weights are damaged, or another model's.
    """
    reader, weights = WeightReader(folder), model.state_dict()
    if any(map(is_adapter, weights)):
        weights = {n: value for n, value in weights.items() if is_adapter(n) or n in reader.names}
    reader.read(weights)
