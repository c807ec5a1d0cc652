"""What a config names on this machine, looked at before anything is started: data, model, folders, memory, GPUs.

Neither torch nor Ray is imported: a mistake is told within a second. What is read here is read again by those who use it.
"""

import asyncio
import ctypes
import importlib.util
import inspect
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlinf_vl.config import Config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.config.schema.limits import FAMILIES, MIXTURE_FAMILIES, TEXT_FAMILIES
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import why_absent
from rlinf_vl.data.cache import cache_root
from rlinf_vl.data.sources import Peek, first_rows, peek, peek_seeds
from rlinf_vl.data.videos import COLUMNS as VIDEO_COLUMNS
from rlinf_vl.data.videos import video_in
from rlinf_vl.engines.sglang.checkpoint import refusals
from rlinf_vl.engines.sglang.machine import missing_tools, require_sglang, server_argument_names
from rlinf_vl.envs.registry import EnvClassError, EnvMaker, keyword_problems, load_env_class
from rlinf_vl.errors import ConfigError, nearest
from rlinf_vl.runtime.cluster import cluster_to_join
from rlinf_vl.runtime.run_folder import ACTOR_FOLDER, STATE_FILE, run_folder
from rlinf_vl.types import Problem

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def packages_missing(config: Config) -> Iterator[str]:
    """What this Python lacks for the run, and for SGLang on GPUs of this machine what compiles its kernels."""
    if config.actor.model.is_lora and importlib.util.find_spec("peft") is None:
        yield "actor.model.is_lora: true needs peft, which is not installed; pip install peft"
    if config.rollout.rollout_backend != "sglang":
        return
    try:
        require_sglang()
    except ImportError as error:
        yield str(error)
        return
    if config.cluster.device != "cpu" and _private(config) and gpu_memory():
        yield from missing_tools()


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for split, paths in (("train", data.train_data_paths), ("val", data.val_data_paths)):
        key, counts = f"data.{split}_data_paths", []
        for path in paths:
            found = Peek(None, None)
            try:
                if toy := TOYS.get(path):
                    found = Peek(list(toy.columns), toy.rows[split])
                elif path.startswith("hf://"):
                    yield from _hub_data(key, path)
                elif seeds := peek_seeds(path):
                    found = seeds
                elif os.path.exists(path):
                    found = peek(Path(path))
                    yield from _videos(config, key, path)
            except ValueError as error:
                yield f"{key}: {path} {error}"
            counts.append(found.rows)
            if found.columns is not None:
                yield from _columns(config, path, found.columns)
        if split == "train" and None not in counts and 0 < (total := sum(counts)) < data.rollout_batch_size:
            yield (
                f"data.rollout_batch_size: {data.rollout_batch_size} problems a step, but {key} has {total} rows; set it to {total} "
                f"or less (a multiple of algorithm.n_minibatches={config.algorithm.n_minibatches}), or add data"
            )


def _videos(config: Config, key: str, path: str) -> Iterator[str]:
    """Videos among the first rows, if they are more than bad rows may be."""
    data = config.data
    rows = []
    with suppress(Exception):  # a damaged file is told of when it is loaded
        rows = first_rows(Path(path), (data.prompt_key, *VIDEO_COLUMNS))
    reasons = (video_in(row, data.prompt_key, data.image_keys) for row in rows)
    found = {number: reason for number, reason in enumerate(reasons) if reason}
    if len(found) > data.max_bad_rows * len(rows):
        number, reason = next(iter(found.items()))
        yield f"{key}: {path}: {len(found)} of the first {len(rows)} rows have a video; row {number}: {reason}"


def _columns(config: Config, path: str, columns: Sequence[str]) -> Iterator[str]:
    data = config.data
    wanted = [("data.prompt_key", data.prompt_key, ""), ("data.answer_key", data.answer_key, "")]
    wanted += [("data.image_keys", column, " or data.image_keys=[] without images;") for column in data.image_keys]
    for key, column, otherwise in wanted:
        if column not in columns:
            hint = f"; name one of those,{otherwise}{nearest(column, columns)}".rstrip(",;")
            yield f"{key}: column {column!r} not in {path}; columns are {', '.join(sorted(columns))}{hint}"


def _environment(config: Config) -> Iterator[str]:
    """An environment is made once (and closed): what its constructor refuses is told now."""
    rollout, scale = config.rollout, config.reward
    try:
        found = load_env_class(rollout.env_class, rollout.env_files)
        problems = [f"rollout.env_kwargs: {problem}" for problem in keyword_problems(found, rollout.env_kwargs)]
        yield from problems
        if not problems:
            rewards = {"reward_max": scale.reward_max_val, "reward_min": scale.reward_min_val}
            make = EnvMaker(rollout.env_class, rollout.env_kwargs, rollout.env_files, lambda *_: False, **rewards)
            env = make(Problem("", (), ""), 0, 0)
            with suppress(Exception):  # as in a run, where an environment that does not close harms nobody
                closed = env.close()
                if inspect.iscoroutine(closed):
                    asyncio.run(closed)
    except Exception as error:  # an environment raises anything
        absent = isinstance(error, ModuleNotFoundError) or isinstance(error.__cause__, ModuleNotFoundError)
        if absent and importlib.util.find_spec("torch") is None:
            return  # not the Python that will run it
        built = f"{rollout.env_class!r} can't be made: {type(error).__name__}: "
        yield f"rollout.env_class: {'' if isinstance(error, EnvClassError) else built}{error}"


def _hub_data(key: str, path: str) -> Iterator[str]:
    name = path.removeprefix("hf://").partition(":")[0]
    if not HUB_NAME.fullmatch(name):
        yield f"{key}: {path!r} is no data set's name on the hub; write hf://owner/name or hf://owner/name:split"
        return
    from huggingface_hub.constants import HF_HOME

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    _, problem = _ask_hub("data set", name, cached=(cache / name.replace("/", "___")).exists())
    if problem:
        yield f"{key}: {path}: {problem}, and name a local file or folder"


def _model(config: Config) -> Iterator[str]:
    path, key = config.rollout.model.model_path, "rollout.model.model_path"
    way_out = f"give a checkpoint's folder, a name on the Hugging Face hub (owner/name), or {', '.join(TOYS)}"
    folder = Path(path)
    in_a_folder = folder.parent != Path(".") and os.path.isdir(folder.parent)
    if path in TOYS:
        yield from _family(config, TOYS[path].model_type)
        yield from _pixels(config, {"patch_size": 8, "merge_size": 2})
        yield from _thinking(config, "")
    elif not path:
        yield f"{key}: empty; {way_out}"
    elif os.path.isdir(path):
        yield from _model_folder(config, folder)
    elif path.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(path) or in_a_folder:
        yield f"{key}: no folder {path!r}{why_absent(path)}; {way_out}"
    else:
        known, problem = _ask_hub("model", path)
        if problem:
            yield f"{key}: {path}: {problem}, or name a local folder;{nearest(path, list(TOYS))}".rstrip(";")
        elif known:
            yield from _family(config, known)


def _model_folder(config: Config, folder: Path) -> Iterator[str]:
    key = f"rollout.model.model_path: {folder}"
    try:
        known = (shape := json.loads((folder / "config.json").read_bytes()))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield (
            f"{key} has no config.json that names a model_type ({type(error).__name__}: {error}); name a checkpoint in "
            "Hugging Face's format, such as 'python -m rlinf_vl export' writes"
        )
        return
    yield from _family(config, known, shape)
    missing, damaged = _missing_and_damaged(folder, with_images=known not in TEXT_FAMILIES)
    if missing:
        yield f"{key} lacks {', '.join(missing)}; fetch or copy the checkpoint whole"
    for name, why in damaged.items():
        yield f"{key}: {name} is damaged or fetched in part ({why}); fetch or copy it anew"
    with suppress(OSError, ValueError, TypeError, AttributeError):
        yield from _pixels(config, json.loads((folder / "preprocessor_config.json").read_bytes()))
    templates = (folder / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    yield from _thinking(config, "".join(file.read_text(errors="replace") for file in templates if file.is_file()))


def _thinking(config: Config, template: str) -> Iterator[str]:
    """What files with a chat template spell; the renderer asks the template itself."""
    mode = config.rollout.thinking.mode
    known = ("enable_thinking", "<think>") if mode == "on" else ("enable_thinking",)
    if mode != "auto" and not any(word in template for word in known):
        yield (
            f"rollout.thinking.mode: {mode}, but the chat template of {config.rollout.model.model_path} doesn't know "
            "enable_thinking; set it auto, or name a checkpoint whose template knows it"
        )


def _missing_and_damaged(folder: Path, with_images: bool) -> tuple[list[str], dict[str, object]]:
    """What a checkpoint's folder lacks; and the files that their readers would stumble over, with what is wrong. Of weights only
    what shows in the first bytes."""
    parts = {
        "weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
        "a tokenizer (tokenizer.json)": ("tokenizer.json", "vocab.json"),
    }
    if with_images:
        parts["an image processor (preprocessor_config.json)"] = ("preprocessor_config.json", "processor_config.json")
    missing = [what for what, names in parts.items() if not any(any(folder.glob(name)) for name in names)]
    damaged: dict[str, object] = {}
    for name in ("tokenizer.json", "preprocessor_config.json", "model.safetensors.index.json"):
        try:
            read = json.loads((folder / name).read_bytes())
            if name.startswith("model"):
                missing += [file for file in sorted(set(read["weight_map"].values())) if not (folder / file).is_file()]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged[name] = error
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with weights.open("rb") as file:
                start = file.read(20)
            if len(start) < 8 or start.startswith(b"version https://"):
                damaged[weights.name] = "a pointer of Git LFS" if start else "it is empty"
        except OSError as error:
            damaged[weights.name] = error
    return missing, damaged


def _family(config: Config, of_checkpoint: str, shape: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The checkpoint's model_type must be a family of ours, and the one that the config says, if it says one; and the engine must
    be able to run a model of this shape (its config.json)."""
    key, said = "rollout.model.model_type", config.rollout.model.model_type
    where = f"the checkpoint at {config.rollout.model.model_path} is of type {of_checkpoint!r}"
    if config.actor.model.vlm.paths is not None:
        yield from _paths(config)
        if of_checkpoint not in FAMILIES and config.rollout.rollout_backend == "sglang":
            yield (
                f"rollout.rollout_backend: sglang has names of its own for weights, which are not known of {of_checkpoint!r}; set "
                "rollout.rollout_backend=torch"
            )
    elif of_checkpoint not in FAMILIES:
        yield (
            f"rollout.model.model_path: {where}, which is not supported; supported: {', '.join(FAMILIES)}. If it has a tower like "
            "Qwen2-VL's, name its parts: actor.model.vlm.vision_encoder_attr and language_model_attr"
        )
    elif said in FAMILIES and said != of_checkpoint:
        yield f"{key}: {said!r}, but {where}; set {key}={of_checkpoint}"
    if of_checkpoint in TEXT_FAMILIES:
        where += ", which has no vision tower"
        if config.data.image_keys:
            yield f"data.image_keys: {config.data.image_keys}, but {where}; set data.image_keys=[], or name a vision-language model"
        if config.actor.model.freeze_language_model:
            yield f"actor.model.freeze_language_model: true leaves nothing to train, for {where}; set it false"
    with suppress(AttributeError, TypeError):  # transformers will say what is wrong with such a config.json
        text = (shape or {}).get("text_config") or shape or {}
        windows = text.get("layer_types") or ["sliding_attention"] * bool(text.get("use_sliding_window"))
        if "sliding_attention" in windows:
            yield (
                f"rollout.model.model_path: the config.json in {config.rollout.model.model_path} has layers that attend within a "
                "sliding window, which is not supported; set use_sliding_window to false in it if the model was trained without"
            )
        yield from _mixture(config, where, of_checkpoint, text)
    if config.rollout.rollout_backend == "sglang":
        device = config.cluster.device
        no_gpu = device == "cpu" or (device == "auto" and _private(config) and gpu_memory() == ())
        with suppress(AttributeError, TypeError):  # transformers will say what is wrong with such a config.json
            for reason in list(refusals(shape or {"model_type": of_checkpoint}, no_gpu)):
                yield f"rollout.model.model_path: {config.rollout.model.model_path}: {reason}"


def _paths(config: Config) -> Iterator[str]:
    """Whether `actor.model.vlm` leads to modules that can be used. This imports torch, and makes the model without its weights."""
    try:
        from rlinf_vl.models.families import family_at
        from rlinf_vl.preflight.model import model_config
    except ImportError:  # not the Python that will run it
        return
    paths, model = config.actor.model.vlm.paths, config.rollout.model
    assert paths is not None
    with suppress(ConfigError):  # its shape isn't known here
        shape, _ = model_config(model.model_path, trust_remote_code=model.trust_remote_code)
        try:
            family_at(shape, paths, trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            yield str(error)


def _mixture(config: Config, where: str, of_checkpoint: str, text: Mapping[str, Any]) -> Iterator[str]:
    """Mixtures of experts: that there are any where a key is about them, and that rows of their products have whole 16 bytes."""
    actor, precision = config.actor, config.actor.fsdp_config.mixed_precision
    if of_checkpoint not in MIXTURE_FAMILIES:
        asked = {"routing_replay": "off", "model.router_aux_loss_coef": 0}
        for key, off in asked.items():
            if (value := attrgetter(key)(actor)) != off:
                yield f"actor.{key}: {value}, but {where}, without a mixture of experts; set it {off}"
        return
    dtypes = {"actor.fsdp_config.mixed_precision.param_dtype": precision.param_dtype}
    if config.rollout.rollout_backend == "torch":
        dtypes["rollout.model.precision"] = config.rollout.model.precision
    for key, dtype in dtypes.items():
        whole = 4 if dtype == "fp32" else 8
        for name in ("hidden_size", "moe_intermediate_size"):
            if (size := text.get(name, 0)) % whole:
                yield (
                    f"{key}: {dtype}, but {where} with {name} {size}: products of experts in {dtype} take multiples of {whole}"
                    f"{'; set it fp32' if size % 4 == 0 else ', in fp32 of 4; take another model'}"
                )


def _pixels(config: Config, processor: dict[str, Any]) -> Iterator[str]:
    """Pixel bounds against one image token's square, and against the longest prompt."""
    low, high, prompt = config.data.image_min_pixels, config.data.image_max_pixels, config.data.max_prompt_length
    token = (int(processor.get("patch_size") or 16) * int(processor.get("merge_size") or 2)) ** 2
    if high is not None and 0 < high < token:
        yield (
            f"data.image_max_pixels: {high} is less than one image token of this model ({token} pixels); set it to {token} or more, "
            "or null for the checkpoint's own"
        )
    if low is not None and low >= token * prompt:
        yield (
            f"data.image_min_pixels: {low} makes every image {low // token} tokens, which no prompt of data.max_prompt_length="
            f"{prompt} holds; lower the one or raise the other"
        )


@cache
def _ask_hub(kind: str, name: str, cached: bool = False) -> tuple[str | None, str | None]:
    """(model_type of a model where it is known, why a name can't be had). Where the hub can't be reached and the cache has what is
    named, the run is told to do without the hub: transformers would ask six times for each of a dozen files."""
    import huggingface_hub as hub

    model_type = None
    try:
        if kind == "data set":
            hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
            return None, None
        if isinstance(config := hub.try_to_load_from_cache(name, "config.json"), str):
            cached, model_type = True, json.loads(Path(config).read_bytes()).get("model_type")
        found = hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return model_type or (found.config or {}).get("model_type"), None
    except hub.errors.HFValidationError:
        return None, "neither a folder here nor a name that the hub allows; write owner/name"
    except hub.errors.GatedRepoError:
        return None, "the hub asks for an agreement first; accept it on its page, then 'hf auth login'"
    except hub.errors.RepositoryNotFoundError:
        return None, f"the hub has no {kind} of that name, or a private one; check it, or 'hf auth login'"
    except Exception as error:  # the client's own, and those of the HTTP library that it was built with
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if cached:
            said = "%s: the hub can't be reached (%s); its copy in the cache is used (HF_HUB_OFFLINE=1)"
            log.warning(said, name, reason)
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
    runner, data, cache, folder = config.runner, config.data, cache_root(), run_folder(config)
    if reason := _unwritable(folder):
        yield f"runner.output_dir: {runner.output_dir!r}: {folder} can't be written ({reason}); name another folder"
    resume = runner.resume_dir
    if resume not in (None, "auto") and os.path.isdir(resume):
        parts = (STATE_FILE, f"{ACTOR_FOLDER}/.metadata")
        if lacking := [name for name in parts if not os.path.isfile(Path(resume) / name)]:
            yield (
                f"runner.resume_dir: {resume!r} is no complete checkpoint (no {lacking[0]} in it); name a "
                "checkpoints/global_step_N folder of a run, or auto"
            )
    toy = not TOYS.keys().isdisjoint([config.rollout.model.model_path, *data.train_data_paths, *data.val_data_paths])
    if (toy or data.image_hosts) and (reason := _unwritable(cache)):
        yield f"the cache folder {cache} can't be written ({reason}); set RLINF_VL_CACHE to another one"


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
    room = {"memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if os.path.isdir("/dev/shm"):
        room["room in /dev/shm"] = shutil.disk_usage("/dev/shm").free
    what, least = min(room.items(), key=lambda item: item[1])
    if wanted > least:
        yield (
            f"cluster.object_store_memory: {wanted} bytes exceed this machine's {what}, {least}; lower it, or null for Ray's own "
            "choice"
        )


def _gpus(config: Config) -> Iterator[str]:
    """For a private cluster; one that is joined is asked when it has been."""
    if config.cluster.device != "cuda" or not _private(config) or (gpus := gpu_memory()) is None:
        return
    if not gpus:
        yield (
            "cluster.device: cuda, but there is no CUDA device here (the driver shows none, or CUDA_VISIBLE_DEVICES hides them); "
            "run it where nvidia-smi shows one, or set cluster.device=cpu"
        )
        return
    try:
        placement_of(config.cluster.component_placement, len(gpus), config.rollout.tensor_parallel_size)
    except ConfigError as error:
        yield from error.problems


def _private(config: Config) -> bool:
    return config.cluster.num_nodes == 1 and cluster_to_join(config.cluster.ray_address, dict(os.environ))[0] is None


def gpu_memory() -> tuple[int, ...] | None:
    """Bytes of each GPU that Ray would find on this machine: NVML's, within CUDA_VISIBLE_DEVICES. None where there may be others'
    (ROCm). torch would take memory of each GPU to tell, for as long as this process lives."""
    if os.path.exists("/dev/kfd"):
        return None
    count, handle, memory = ctypes.c_uint(0), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
    except OSError:
        return ()
    there, visible = count.value, os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        there = min(there, sum(one.strip() not in ("", "-1", "NoDevFiles") for one in visible.split(",")))
    sizes = []
    for i in range(there):
        nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        sizes.append(memory[0])
    return tuple(sizes)


#: Rules that find what of the things that a config names would stop its run on this machine.
RULES = (_data, _environment, _model, _server_arguments, _folders, _object_store, _gpus)
