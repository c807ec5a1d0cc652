"""What a config names on this machine, looked at before anything is started: data, model, folders, memory, GPUs.

Neither torch nor Ray is imported: a mistake is told within a second. What is read here is read again by those who use it.
"""

import asyncio
import importlib.util
import inspect
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlinf_vl.code import CodeError, check_code, is_code
from rlinf_vl.config import Config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.cache import cache_root
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.sources import Peek, first_rows, peek, peek_seeds
from rlinf_vl.data.unusable import NOT_FETCHED, RowError
from rlinf_vl.engines.sglang.machine import missing_tools, require_sglang, server_argument_names
from rlinf_vl.envs.registry import EnvMaker, check_env_class, keyword_problems, load_env_class
from rlinf_vl.errors import ConfigError, nearest, reason_of
from rlinf_vl.preflight import gpus
from rlinf_vl.preflight.checkpoint import checkpoint
from rlinf_vl.preflight.hub import HUB_NAME, ask_hub
from rlinf_vl.preflight.teacher import teacher
from rlinf_vl.rewards.forms import SIGNATURE
from rlinf_vl.rewards.named import named_function
from rlinf_vl.rewards.processes import load_function
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, STATE_FILE, folder_at, newest_checkpoint
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.types import Problem

log = logging.getLogger(__name__)


def packages_missing(config: Config) -> Iterator[str]:
    """What this Python lacks for the run, and for SGLang on GPUs of this machine what compiles its kernels."""
    if config.actor.model.is_lora and importlib.util.find_spec("peft") is None:
        yield "actor.model.is_lora: true needs peft, which is not installed; pip install peft"
    if config.actor.model.is_lora and config.actor.model.lora.quantization == "nf4" and (why := _without_nf4(config)):
        yield f"actor.model.lora.quantization: nf4 needs bitsandbytes, {why}, or set none: the model is stored in param_dtype"
    if config.rollout.rollout_backend != "sglang":
        return
    try:
        require_sglang()
    except ImportError as error:
        yield str(error)
        return
    if config.cluster.device != "cpu" and gpus.is_private(config) and gpus.gpu_memory():
        yield from missing_tools()


def _without_nf4(config: Config) -> str | None:
    """Why nf4 can't be computed here, and the way out. Tried in a process of its own, with which the GPU's memory goes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "which is not installed; pip install 'rlinf_vl[qlora]'"
    device = "cuda" if config.cluster.device != "cpu" and gpus.gpu_memory() else "cpu"
    command = [sys.executable, "-c", f"from rlinf_vl.models.nf4 import try_on; try_on({device!r})"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return f"which does not answer on {device}; install one that does"
    said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
    return f"which fails on {device} ({said[-1]}); install one that runs there" if tried.returncode else None


def _data(config: Config, with_rows: bool = True) -> Iterator[str]:
    """`with_rows`: also what is wrong with the rows, of which `check-data` finds more."""
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
            except ValueError as error:
                yield f"{key}: {path} {error}"
            counts.append(found.rows)
            if found.columns is not None:
                level_key = data.curriculum_key if split == "train" else None
                problems = list(_columns(config, path, found.columns, level_key))
                if with_rows and not problems and os.path.isfile(path):
                    yield from _rows(config, key, path, found.columns)
                yield from problems
        if (
            with_rows
            and split == "train"
            and None not in counts
            and 0 < (total := sum(counts)) < data.rollout_batch_size
        ):
            yield (
                f"data.rollout_batch_size: {data.rollout_batch_size} problems a step, but {key} has {total} rows; set it to {total} "
                f"or less (a multiple of algorithm.n_minibatches={config.algorithm.n_minibatches}), or add data"
            )


def _rows(config: Config, key: str, path: str, columns: Sequence[str]) -> Iterator[str]:
    """What is wrong with the first rows, if more of them are bad than may be. Nothing is fetched from the network for that."""
    try:
        from rlinf_vl.data.rows import row_to_problem
    except ImportError:  # not the Python that will run it
        return
    form = RowFormat.of(config.data).for_columns(columns)
    rows, reasons = [], {}
    with suppress(Exception):  # a damaged file is told of when it is loaded
        rows = first_rows(Path(path), columns)
    for number, row in enumerate(rows):
        try:
            row_to_problem(row, str(number), replace(form, image_hosts=()), Path(path).parent)
        except RowError as error:
            if not (error.kind == NOT_FETCHED and form.image_hosts):
                reasons[number] = error.reason
    if len(reasons) > config.data.max_bad_rows * len(rows):
        number, reason = next(iter(reasons.items()))
        bad = f"{len(reasons)} of the first {len(rows)} rows can't be used"
        yield f"{key}: {path}: {bad}; row {number}: {reason}; 'rlinf-vl check-data' names them all"


def _columns(config: Config, path: str, columns: Sequence[str], level_key: str | None) -> Iterator[str]:
    form = RowFormat.of(config.data).for_columns(columns)
    further = {} if level_key is None else {level_key.partition(".")[0]: "data.curriculum_key"}
    missing = False
    for column, key in (form.columns | further).items():
        if column not in columns:
            missing = True
            otherwise = " or data.image_keys=[] without images;" if key == "data.image_keys" else ""
            hint = f"; name one of those,{otherwise}{nearest(column, columns)}".rstrip(",;")
            yield f"{key}: column {column!r} not in {path}; columns are {', '.join(sorted(columns))}{hint}"
    if not missing and (reason := form.missing_column(columns, path)):
        yield reason


def _environment(config: Config) -> Iterator[str]:
    """An environment is made once (and closed): what its constructor refuses is told now."""
    rollout, scale = config.rollout, config.reward
    try:
        check_env_class(rollout.env_class, config.runner.code_files)
        found = load_env_class(rollout.env_class, config.runner.code_files)
        problems = [f"rollout.env_kwargs: {problem}" for problem in keyword_problems(found, rollout.env_kwargs)]
        yield from problems
        if not problems:
            rewards = {"reward_max": scale.reward_max_val, "reward_min": scale.reward_min_val}
            make = EnvMaker(
                rollout.env_class, rollout.env_kwargs, config.runner.code_files, lambda *_: False, **rewards
            )
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
        yield f"rollout.env_class: {'' if isinstance(error, CodeError) else built}{error}"


def _hub_data(key: str, path: str) -> Iterator[str]:
    name = path.removeprefix("hf://").partition(":")[0]
    if not HUB_NAME.fullmatch(name):
        yield f"{key}: {path!r} is no data set's name on the hub; write hf://owner/name or hf://owner/name:split"
        return
    from huggingface_hub.constants import HF_HOME

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    _, problem = ask_hub("data set", name, cached=(cache / name.replace("/", "___")).exists())
    if problem:
        yield f"{key}: {path}: {problem}, and name a local file or folder"


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
    for name in ("checkpoint_dir", "resume_dir"):
        if "://" in (url := getattr(runner, name) or ""):
            try:
                folder_at(url).exists()
            except Exception as error:  # each store's library has its own
                reason = reason_of(error).splitlines()[0]
                yield f"runner.{name}: {url!r} can't be reached ({reason}); name a folder, or a URL that fsspec reaches"
    elsewhere = runner.checkpoint_dir
    if elsewhere and "://" not in elsewhere and (reason := _unwritable(Path(elsewhere))):
        yield f"runner.checkpoint_dir: {elsewhere!r} can't be written ({reason}); name another folder"
    resume = runner.resume_dir
    is_folder = resume not in (None, "auto") and os.path.isdir(resume)
    if is_folder and (newest := newest_checkpoint(Path(resume))):
        resume = str(newest)  # a run's folder
    if is_folder:
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
    if wanted is None or not gpus.is_private(config):
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
    if config.cluster.device != "cuda" or not gpus.is_private(config) or (there := gpus.gpu_memory()) is None:
        return
    if not there:
        yield (
            "cluster.device: cuda, but there is no CUDA device here (the driver shows none, or CUDA_VISIBLE_DEVICES hides them); "
            "run it where nvidia-smi shows one, or set cluster.device=cpu"
        )
        return
    try:
        placement_of(config, (len(there),))
    except ConfigError as error:
        yield from error.problems


def _rewards(config: Config) -> Iterator[str]:
    """Functions are imported here, too: what can't be called is told now."""
    reward = config.reward
    for number, entry in enumerate(reward.entries):
        name, kwargs = entry.get("function"), entry.get("kwargs", {})
        if not isinstance(name, str) or not isinstance(kwargs, dict):
            continue  # which another rule tells
        key = f"reward.functions[{number}]" if reward.functions else "reward.reward_type"
        try:
            if is_code(name):
                check_code(name, {}, config.runner.code_files, kind="reward function", signature=SIGNATURE)
                load_function(name, kwargs, config.runner.code_files)
            else:
                named_function(name, kwargs, reward.judge_hosts)
        except CodeError as error:
            yield f"{key}: {error}"


#: Rules that find what of the things that a config names would stop its run on this machine.
RULES = (_data, _environment, _rewards, checkpoint, teacher, _server_arguments, _folders, _object_store, _gpus)
#: Those on the data, the graders and the model whose tokens are counted.
DATA_RULES = (partial(_data, with_rows=False), _rewards, checkpoint)
