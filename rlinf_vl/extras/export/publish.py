"""Publishing a checkpoint as a model that others can load: a folder, or a repository of the Hugging
Face hub, with a model card."""

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path

from upath import UPath

from rlinf_vl.config.hubs import HUB_NAME
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.export.run_code import refuse_code_of_run
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_at, config_of, load_state

log = logging.getLogger(__name__)


def publish(
    source: Folder,
    output: Path | None,
    *,
    dtype: str = "bf16",
    adapters: bool = False,
    push: str | None = None,
    private: bool = False,
    trust_run_code: bool = False,
) -> str:
    """Export a checkpoint with its model card; returns the folder, or the repository's address.

    Args:
        source, dtype, adapters, trust_run_code: as in `export_checkpoint`.
        output: the folder; None: write to the hub only.
        push: `owner/name` on the hub, made if it does not exist.
        private: make the repository a private one.

    Raises:
        ConfigError: neither folder nor repository is named, or the hub refuses the repository;
            raised before anything is loaded. The folder brings Python along that is not trusted.
        RunError: the hub can't be reached.
        FileNotFoundError, FileExistsError: see `export_checkpoint`.
    """
    if output is None and push is None:
        raise ConfigError(
            "export: nowhere to write to; name a folder, or --push owner/name for the Hugging "
            "Face hub"
        )
    checkpoint = checkpoint_at(source)
    refuse_code_of_run(config_of(checkpoint), checkpoint.resolve().parents[1], trust_run_code)
    # A repository that is refused is reported before the export, which takes minutes.
    if push:
        push = _make_repository(push, private)
    from rlinf_vl.extras.export.card import write_card
    from rlinf_vl.extras.export.export import export_checkpoint  # imports transformers: seconds

    with ExitStack() as stack:
        folder = output or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rlinf_vl-export-"))
        )
        exported = export_checkpoint(checkpoint, folder, dtype, adapters, trust_run_code)
        on_hub = not exported.base.startswith(("/", ".")) and bool(
            HUB_NAME.fullmatch(exported.base)
        )
        run_dir = source if (source / "config.yaml").is_file() else checkpoint.resolve().parents[1]
        # A remote folder has the config, and no metrics to draw a curve from.
        if isinstance(run_dir, UPath):
            local = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="rlinf_vl-export-"))
            )
            (local / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
            run_dir = local
        write_card(
            run_dir,
            load_state(checkpoint)["step"],
            folder,
            adapters=adapters,
            base=exported.base,
            on_hub=on_hub,
            vision=exported.family.vision_tower is not None,
        )
        return _push(folder, push) if push else str(folder)


def _make_repository(name: str, private: bool) -> str:
    """Make a repository unless it exists, and return its full name.

    Raises:
        ConfigError: the hub doesn't let this user write there.
        RunError: the hub can't be reached.
    """
    import huggingface_hub as hub

    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"--push {name!r}: no name that the hub allows; write owner/name")
    try:
        return hub.HfApi().create_repo(name, private=private or None, exist_ok=True).repo_id
    except hub.errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ConfigError(
                f"--push {name}: the hub refuses ({_reason(error)}); log in with 'hf auth login', "
                "or set HF_TOKEN to a token that may write there"
            ) from error
        raise RunError(f"--push {name}: {_reason(error)}") from error
    # Errors of the client, and of the HTTP library that it was built with.
    except Exception as error:
        raise RunError(f"--push {name}: the hub can't be reached ({_reason(error)})") from error


def _push(folder: Path, name: str) -> str:
    """Upload the folder to the repository, and return its address."""
    import huggingface_hub as hub

    try:
        hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Trained with rlinf_vl"
        )
    # Errors of the client, and of its HTTP library, as in `_make_repository`.
    except Exception as error:
        raise RunError(
            f"--push {name}: the upload failed ({_reason(error)}); run it again: what is there "
            "isn't sent twice"
        ) from error
    return f"{hub.constants.ENDPOINT}/{name}"


def _reason(error: Exception) -> str:
    # The hub's errors begin with addresses and request ids; their last line is the reason.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1]
