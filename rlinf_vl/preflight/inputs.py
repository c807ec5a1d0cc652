"""What a config names on this machine, looked at before anything is started: data, model, folders, memory, GPUs.

Neither torch nor Ray is imported: a mistake is told within a second. What is read here is read again by those who use it.
"""

import ctypes
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlinf_vl.config import Config, config_keys
from rlinf_vl.config.keys import nearest
from rlinf_vl.config.placement import placement_of
from rlinf_vl.config.validate import why_absent
from rlinf_vl.data.cache import cache_root
from rlinf_vl.data.sources import TOY, peek
from rlinf_vl.engines.sglang.cuda import missing_tools
from rlinf_vl.engines.sglang.version import require_sglang, server_argument_names
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.cluster import cluster_to_join
from rlinf_vl.runtime.run_folder import ACTOR_FOLDER, STATE_FILE

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0


def problems_here(config: Config) -> Iterator[str]:
    """What of the things that a config names would stop its run on this machine, each with the key, its value and the way out."""
    for rule in (_data, _model, _server_arguments, _folders, _object_store, _gpus):
        yield from rule(config)


def packages_missing(config: Config) -> Iterator[str]:
    """What this Python lacks for the run, and for SGLang on GPUs of this machine what compiles its kernels."""
    if config.rollout.rollout_backend != "sglang":
        return
    try:
        require_sglang()
    except ImportError as error:
        yield str(error)
        return
    if config.cluster.device != "cpu" and _private(config) and gpu_count():
        yield from missing_tools()


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for key, paths in (("data.train_data_paths", data.train_data_paths), ("data.val_data_paths", data.val_data_paths)):
        total: int | None = 0
        for path in paths:
            columns, rows = None, None
            if path == "toy":
                columns, rows = TOY["train" if key == "data.train_data_paths" else "val"]
            elif path.startswith("hf://"):
                yield from _hub_data(key, path)
            elif os.path.exists(path):
                try:
                    columns, rows = peek(Path(path))
                except ValueError as error:
                    yield f"{key}: {path} {error}"
            total = None if total is None or rows is None else total + rows
            if columns is not None:
                yield from _columns(config, path, columns)
        if key == "data.train_data_paths" and total is not None and 0 < total < data.rollout_batch_size:
            yield (
                f"data.rollout_batch_size: {data.rollout_batch_size} problems a step, but {key} has {total} rows; "
                f"set it to {total} or less (a multiple of algorithm.n_minibatches={config.algorithm.n_minibatches}), or add data"
            )


def _columns(config: Config, path: str, columns: Sequence[str]) -> Iterator[str]:
    data = config.data
    wanted = [("data.prompt_key", data.prompt_key, ""), ("data.answer_key", data.answer_key, "")]
    wanted += [("data.image_keys", column, " or data.image_keys=[] without images;") for column in data.image_keys]
    for key, column, otherwise in wanted:
        if column not in columns:
            hint = f"; name one of those,{otherwise}{nearest(column, columns)}".rstrip(",;")
            yield f"{key}: column {column!r} not in {path}; columns are {', '.join(sorted(columns))}{hint}"


def _hub_data(key: str, path: str) -> Iterator[str]:
    name = path.removeprefix("hf://").partition(":")[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        yield f"{key}: {path!r} is no data set's name on the hub; write hf://owner/name or hf://owner/name:split"
        return
    from huggingface_hub.constants import HF_HOME

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    _, problem = _ask_hub("data set", name, cached=(cache / name.replace("/", "___")).exists())
    if problem:
        yield f"{key}: {path}: {problem}, and name a local file or folder"


def _model(config: Config) -> Iterator[str]:
    model = config.rollout.model
    path, key = model.model_path, "rollout.model.model_path"
    if path == "toy":
        yield from _family(config, "qwen3_vl")
        yield from _pixels(config, {"patch_size": 8, "merge_size": 2})
        return
    folder = Path(path)
    if not path:
        yield f"{key}: empty; give a checkpoint's folder, a name on the Hugging Face hub (owner/name), or toy"
        return
    if not os.path.isdir(path):
        if path.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) or _parent_is_here(folder):
            yield (
                f"{key}: no folder {path!r}{why_absent(path)}; give a checkpoint's folder, a name on the Hugging Face hub "
                "(owner/name), or toy"
            )
            return
        known, problem = _ask_hub("model", path)
        if problem:
            yield f"{key}: {path}: {problem}, or name a local folder;{nearest(path, ['toy'])}".rstrip(";")
        elif known:
            yield from _family(config, known)
        return
    try:
        written = json.loads((folder / "config.json").read_bytes())
        known = written["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield (
            f"{key}: {path} has no config.json that names a model_type ({type(error).__name__}: {error}); name a checkpoint in "
            "Hugging Face's format, such as 'python -m rlinf_vl export' writes"
        )
        return
    yield from _family(config, known)
    missing = [
        what
        for what, names in (
            ("weights (*.safetensors)", ("*.safetensors", "pytorch_model*.bin")),
            ("a tokenizer (tokenizer.json)", ("tokenizer.json", "vocab.json")),
            ("an image processor (preprocessor_config.json)", ("preprocessor_config.json", "processor_config.json")),
        )
        if not any(True for name in names for _ in folder.glob(name))
    ]
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        missing += [file for file in sorted(set(index["weight_map"].values())) if not (folder / file).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if missing:
        yield f"{key}: {path} lacks {', '.join(missing)}; fetch or copy the checkpoint whole"
    for damaged, why in _damaged(folder):
        yield f"{key}: {path}: {damaged} is damaged or fetched in part ({why}); fetch or copy it anew"
    try:
        yield from _pixels(config, json.loads((folder / "preprocessor_config.json").read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError):
        pass


def _damaged(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of files of a checkpoint's folder that their readers would stumble over; of weights only what shows
    in the first bytes."""
    for name in ("tokenizer.json", "preprocessor_config.json", "model.safetensors.index.json"):
        try:
            json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            yield name, str(error)
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with weights.open("rb") as file:
                start = file.read(20)
            if len(start) < 8 or start.startswith(b"version https://"):
                yield weights.name, "a pointer of Git LFS" if start else "it is empty"
        except OSError as error:
            yield weights.name, str(error)


def _parent_is_here(path: Path) -> bool:
    return path.parent != Path(".") and os.path.isdir(path.parent)


def _family(config: Config, of_checkpoint: str) -> Iterator[str]:
    """The checkpoint's model_type must be a family of ours, and the one that the config says."""
    key, said = "rollout.model.model_type", config.rollout.model.model_type
    families = config_keys()[key].allowed
    assert isinstance(families, tuple)
    where = f"the checkpoint at {config.rollout.model.model_path} is of type {of_checkpoint!r}"
    if of_checkpoint not in families:
        yield f"rollout.model.model_path: {where}, which is not supported; supported: {', '.join(families)}"
    elif said in families and said != of_checkpoint:
        yield f"{key}: {said!r}, but {where}; set {key}={of_checkpoint}"


def _pixels(config: Config, processor: dict[str, Any]) -> Iterator[str]:
    """Pixel bounds against one image token's square, and against the longest prompt."""
    data = config.data
    token = (int(processor.get("patch_size") or 16) * int(processor.get("merge_size") or 2)) ** 2
    if data.image_max_pixels is not None and 0 < data.image_max_pixels < token:
        yield (
            f"data.image_max_pixels: {data.image_max_pixels} is less than one image token of this model ({token} pixels); "
            f"set it to {token} or more, or null for the checkpoint's own"
        )
    if data.image_min_pixels is not None and data.image_min_pixels >= token * data.max_prompt_length:
        yield (
            f"data.image_min_pixels: {data.image_min_pixels} makes every image {data.image_min_pixels // token} tokens, which no "
            f"prompt of data.max_prompt_length={data.max_prompt_length} holds; lower the one or raise the other"
        )


@cache
def _ask_hub(kind: str, name: str, cached: bool = False) -> tuple[str | None, str | None]:
    """(model_type of a model where it is known, why a name can't be had). Where the hub can't be reached and the cache has what is
    named, the run is told to do without the hub: transformers would ask six times for each of a dozen files."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return None, "neither a folder here nor a name that the hub allows; write owner/name"
    model_type = None
    if kind == "model" and isinstance(config := hub.try_to_load_from_cache(name, "config.json"), str):
        cached, model_type = True, json.loads(Path(config).read_bytes()).get("model_type")
    try:
        if kind == "model":
            found = hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            return model_type or (found.config or {}).get("model_type"), None
        hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
        return None, None
    except hub.errors.GatedRepoError:
        return None, "the hub asks for an agreement first; accept it on its page, then 'hf auth login'"
    except hub.errors.RepositoryNotFoundError:
        return None, f"the hub has no {kind} of that name, or a private one; check it, or 'hf auth login'"
    except Exception as error:  # the client's own, and those of the HTTP library that it was built with
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if cached:
            log.warning(
                "%s: the hub can't be reached (%s); its copy in the cache is used (HF_HUB_OFFLINE=1)", name, reason
            )
            os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes of a private cluster
            hub.constants.HF_HUB_OFFLINE = True  # for this one, which has read it
            return model_type, None
        fetch = f"hf download {name}" + (" --repo-type dataset --local-dir DIR" if kind == "data set" else "")
        return None, f"not in the cache here, and the hub can't be reached ({reason}); run '{fetch}' where it can"


def _server_arguments(config: Config) -> Iterator[str]:
    """Names only, where SGLang is installed: an engine would refuse them after Ray has started."""
    asked = config.rollout.sglang.server_args if config.rollout.rollout_backend == "sglang" else {}
    if asked and (known := server_argument_names()):
        for name in asked.keys() - known:
            yield (
                f"rollout.sglang.server_args: SGLang has no argument {name!r}; write it as in its ServerArgs, with underscores;"
                f"{nearest(str(name), sorted(known))}"
            ).rstrip(";")


def _folders(config: Config) -> Iterator[str]:
    runner, data = config.runner, config.data
    folder = Path(runner.output_dir) / runner.experiment_name
    if reason := _unwritable(folder):
        yield f"runner.output_dir: {runner.output_dir!r}: {folder} can't be written ({reason}); name another folder"
    resume = runner.resume_dir
    if resume not in (None, "auto") and os.path.isdir(resume):
        lacking = [
            name for name in (STATE_FILE, f"{ACTOR_FOLDER}/.metadata") if not os.path.isfile(Path(resume) / name)
        ]
        if lacking:
            yield (
                f"runner.resume_dir: {resume!r} is no complete checkpoint (no {lacking[0]} in it); name a "
                "checkpoints/global_step_N folder of a run, or auto"
            )
    toy = "toy" in [config.rollout.model.model_path, *data.train_data_paths, *data.val_data_paths]
    if (toy or data.image_hosts) and (reason := _unwritable(cache_root())):
        yield f"the cache folder {cache_root()} can't be written ({reason}); set RLINF_VL_CACHE to another one"


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder that may not be there yet; None if it can. Nothing is left behind."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return f"{str(folder)!r}: {getattr(error, 'strerror', None) or error}"
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _object_store(config: Config) -> Iterator[str]:
    wanted = config.cluster.object_store_memory
    if wanted is None or not _private(config):
        return
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for room, what in ((memory, "memory"), (shared.f_bavail * shared.f_frsize if shared else None, "room in /dev/shm")):
        if room is not None and wanted > room:
            yield (
                f"cluster.object_store_memory: {wanted} bytes exceed this machine's {what}, {room}; lower it, or null for Ray's "
                "own choice"
            )
            return


def _gpus(config: Config) -> Iterator[str]:
    """For a private cluster; one that is joined is asked when it has been."""
    if config.cluster.device != "cuda" or not _private(config) or (count := gpu_count()) is None:
        return
    if count == 0:
        yield (
            "cluster.device: cuda, but there is no CUDA device here (the driver shows none, or CUDA_VISIBLE_DEVICES hides them); "
            "run it where nvidia-smi shows one, or set cluster.device=cpu"
        )
        return
    try:
        placement_of(config.cluster.component_placement, count, config.rollout.tensor_parallel_size)
    except ConfigError as error:
        yield from error.problems


def _private(config: Config) -> bool:
    return config.cluster.num_nodes == 1 and cluster_to_join(config.cluster.ray_address, dict(os.environ))[0] is None


def gpu_count() -> int | None:
    """GPUs that Ray would find on this machine: NVML's, within CUDA_VISIBLE_DEVICES. None where there may be others' (ROCm)."""
    if os.path.exists("/dev/kfd"):
        return None
    count = ctypes.c_uint(0)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    return min(count.value, len([one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")]))
