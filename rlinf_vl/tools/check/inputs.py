"""Check a config's data, model, folders, memory and GPUs on this machine before a run.

Neither torch nor Ray is imported, so that a mistake shows within a second. The run reads all of it
again.
"""

import ast
import asyncio
import importlib
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

from rlinf_vl.config import Config
from rlinf_vl.config.hubs import HUB_NAME
from rlinf_vl.config.imitation import as_problems
from rlinf_vl.config.placement import placement_of
from rlinf_vl.config.schema.rollout import AGENT_CALL
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.cache import cache_root
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.sources import Peek, first_rows, peek, peek_seeds
from rlinf_vl.data.unusable import NOT_FETCHED, RowError
from rlinf_vl.engines.sglang.machine import missing_tools, require_sglang
from rlinf_vl.envs.registry import EnvMaker, check_env_class, keyword_problems, load_env_class
from rlinf_vl.errors import ConfigError, nearest, pip_install, reason_of
from rlinf_vl.extras.verifiers.rows import environment_missing
from rlinf_vl.rewards.forms import SIGNATURE
from rlinf_vl.rewards.named import named_function
from rlinf_vl.rewards.processes import load_function
from rlinf_vl.runtime import gpus
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, STATE_FILE, folder_at, newest_checkpoint
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.tools.check.checkpoint import checkpoint
from rlinf_vl.tools.check.hub import ask_hub
from rlinf_vl.tools.check.teacher import teachers
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError, check_code, is_code, load_code

log = logging.getLogger(__name__)


def packages_missing(config: Config) -> Iterator[str]:
    """Yield the packages that this Python lacks for the run, and the tools to compile kernels.

    The tools are SGLang's, and needed where this machine has GPUs.
    """
    yield from libraries_missing(config)
    if config.rollout.rollout_backend != "sglang":
        return
    try:
        require_sglang()
    except ImportError as error:
        yield str(error)
        return
    if config.cluster.device != "cpu" and gpus.is_private(config) and gpus.gpu_memory():
        yield from missing_tools()


def libraries_missing(config: Config) -> Iterator[str]:
    """Yield the packages besides SGLang that this Python lacks for the run.

    Those of agents and trackers are imported: they may lack a package of their own.
    """
    if config.actor.model.is_lora and importlib.util.find_spec("peft") is None:
        yield (
            f"actor.model.is_lora: true needs peft, which is not installed; {pip_install('peft')}"
        )
    if (
        config.actor.model.is_lora
        and config.actor.model.lora.quantization == "nf4"
        and (why := _without_nf4(config))
    ):
        yield f"actor.model.lora.quantization: nf4 needs bitsandbytes, {why}, or set none: the model is stored in param_dtype"
    agent, name = config.rollout.agent, config.rollout.verifiers_name
    if name is not None and (reason := environment_missing(name) or _import_problem("verifiers")):
        yield f"rollout.env_class: {config.rollout.env_class!r}: {reason}"
    if config.rollout.has_agents:
        modules = ["uvicorn", "starlette.applications"]
        modules += ["openai"] if agent.function or name else []
        modules += ["httpx"] if agent.app else []
        if reasons := [*filter(None, map(_import_problem, modules))]:
            yield f"rollout.agent: {'; '.join(reasons)}; {pip_install('rlinf_vl[agents]')}"
    for backend in ("wandb", "trackio"):
        # A rule of the config refuses one that is not installed.
        is_used = backend in config.runner.logger.logger_backends
        if is_used and importlib.util.find_spec(backend) and (reason := _import_problem(backend)):
            yield f"runner.logger.logger_backends: {reason}; {pip_install(f'rlinf_vl[{backend}]')}"


def _import_problem(module: str) -> str | None:
    """Return why a module can't be imported; None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name == package:
            return f"{package} is not installed"
        return f"{package} can't be imported ({error})"
    return None


def _without_nf4(config: Config) -> str | None:
    """Return why nf4 can't be computed here, and what to do; None if it can.

    It is tried in a process of its own, whose end frees the GPU's memory.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"which is not installed; {pip_install('rlinf_vl[qlora]')}"
    device = "cuda" if config.cluster.device != "cpu" and gpus.gpu_memory() else "cpu"
    command = [sys.executable, "-c", f"from rlinf_vl.models.nf4 import try_on; try_on({device!r})"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return f"which does not answer on {device}; install one that does"
    error_lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    return (
        f"which fails on {device} ({error_lines[-1]}); install one that runs there"
        if result.returncode
        else None
    )


def _data(config: Config, with_rows: bool = True) -> Iterator[str]:
    """Yield the problems of the data; those of its first rows, too, if `with_rows`.

    `check-data` finds more problems of rows.
    """
    data = config.data
    if data.sample_val:
        yield from _data(as_problems(config), with_rows)
    for split, paths in (("train", data.train_data_paths), ("val", data.val_data_paths)):
        key, counts = f"data.{split}_data_paths", []
        for path in paths:
            # What can't be read ahead is unknown and no problem: loading reports it.
            contents = Peek(None, None)
            try:
                if toy := TOYS.get(path):
                    contents = Peek(list(toy.columns), toy.rows[split])
                elif path.startswith("hf://"):
                    yield from _hub_data(key, path)
                elif seeds := peek_seeds(path):
                    contents = seeds
                elif os.path.exists(path):
                    contents = peek(Path(path))
            except ValueError as error:
                yield f"{key}: {path} {error}"
            counts.append(contents.rows)
            if contents.columns is not None:
                # Validation has no order.
                level_key = data.curriculum_key if split == "train" else None
                problems = list(_columns(config, path, contents.columns, level_key))
                if with_rows and not problems and os.path.isfile(path):
                    yield from _rows(config, key, path, contents.columns)
                yield from problems
        # A data set on the hub has an unknown number of rows: then there is nothing to compare.
        known_counts = [count for count in counts if count is not None]
        total = sum(known_counts)
        is_known = with_rows and split == "train" and len(known_counts) == len(counts)
        if is_known and 0 < total < data.rollout_batch_size:
            yield (
                f"data.rollout_batch_size: {data.rollout_batch_size} problems a step, but {key} "
                f"has {total} rows; set it to {total} or less (a multiple of "
                f"algorithm.n_minibatches={config.algorithm.n_minibatches}), or add data"
            )


def _rows(config: Config, key: str, path: str, columns: Sequence[str]) -> Iterator[str]:
    """Yield a problem if more of the first rows are bad than the config allows.

    Nothing is fetched from the network for that.
    """
    try:
        from rlinf_vl.data.rows import row_to_problem
    except ImportError:  # the run will use another Python, which has the packages
        return
    row_format = RowFormat.of(config.data).for_columns(columns)
    rows, reasons = [], {}
    with suppress(Exception):  # a damaged file is reported when it is loaded
        rows = first_rows(Path(path), columns)
    for number, row in enumerate(rows):
        try:
            row_to_problem(row, str(number), replace(row_format, image_hosts=()), Path(path).parent)
        except RowError as error:
            # An image on a host is not bad: it is fetched later.
            if not (error.kind == NOT_FETCHED and row_format.image_hosts):
                reasons[number] = error.reason
    # The share of the run itself, so that a few bad rows at the start refuse nothing.
    if len(reasons) > config.data.max_bad_rows * len(rows):
        number, reason = next(iter(reasons.items()))
        bad_rows = f"{len(reasons)} of the first {len(rows)} rows can't be used"
        yield f"{key}: {path}: {bad_rows}; row {number}: {reason}; 'rlinf-vl check-data' names them all"


def _columns(
    config: Config, path: str, columns: Sequence[str], level_key: str | None
) -> Iterator[str]:
    """Yield the columns that the config names and the file lacks.

    `level_key`: of the curriculum, None without one.
    """
    row_format = RowFormat.of(config.data).for_columns(columns)
    curriculum_columns = (
        {} if level_key is None else {level_key.partition(".")[0]: "data.curriculum_key"}
    )
    has_missing = False
    for column, key in (row_format.columns | curriculum_columns).items():
        if column not in columns:
            has_missing = True
            alternative = (
                " or data.image_keys=[] without images;" if key == "data.image_keys" else ""
            )
            hint = f"; name one of those,{alternative}{nearest(column, columns)}".rstrip(",;")
            yield f"{key}: column {column!r} not in {path}; columns are {', '.join(sorted(columns))}{hint}"
    if not has_missing and (reason := row_format.missing_column(columns, path)):
        yield reason


def _environment(config: Config) -> Iterator[str]:
    """Yield the problems of making an environment: one is made, and closed.

    So a value that its constructor refuses shows before Ray starts.
    """
    rollout, scale = config.rollout, config.reward
    if rollout.verifiers_name is not None:
        return
    try:
        check_env_class(rollout.env_class, config.runner.code_files)
        env_class = load_env_class(rollout.env_class, config.runner.code_files)
        problems = [
            f"rollout.env_kwargs: {problem}"
            for problem in keyword_problems(env_class, rollout.env_kwargs)
        ]
        yield from problems
        if not problems:
            make = EnvMaker(
                rollout.env_class,
                rollout.env_kwargs,
                config.runner.code_files,
                lambda *_: False,
                reward_max=scale.reward_max_val,
                reward_min=scale.reward_min_val,
            )
            env = make(Problem("", (), ""), 0, 0)
            # As in a run, where an environment that does not close harms nobody.
            with suppress(Exception):
                closing = env.close()
                if inspect.iscoroutine(closing):
                    asyncio.run(closing)
    except Exception as error:  # an environment may raise anything
        lacks_module = isinstance(error, ModuleNotFoundError) or isinstance(
            error.__cause__, ModuleNotFoundError
        )
        if lacks_module and importlib.util.find_spec("torch") is None:
            return  # the run will use another Python, which has the packages
        prefix = f"{rollout.env_class!r} can't be made: {type(error).__name__}: "
        yield f"rollout.env_class: {'' if isinstance(error, CodeError) else prefix}{error}"


def _agent(config: Config) -> Iterator[str]:
    """Yield the problem of loading an agent's function, of finding a command, or of an app's address."""
    agent = config.rollout.agent
    if agent.function is not None:
        files = config.runner.code_files
        try:
            # Without running it first: a mistake in its name should not wait for its imports.
            check_code(agent.function, {}, files, kind="agent", signature=AGENT_CALL)
            load_code(agent.function, {}, files, kind="agent", signature=AGENT_CALL)
        except CodeError as error:
            yield f"rollout.agent.function: {error}"
    elif agent.command and gpus.is_private(config) and shutil.which(agent.command[0]) is None:
        yield (
            f"rollout.agent.command: {agent.command[0]!r} is no command here; give a path, or "
            "install it"
        )
    elif agent.app is not None and gpus.is_private(config):
        from rlinf_vl.extras.agents.app_driver import agents_app

        try:
            agents_app(agent.app, agent.timeout)
        except ValueError as error:
            yield f"rollout.agent.app: {error}"


def _hub_data(key: str, path: str) -> Iterator[str]:
    """Yield a problem unless the hub, or its cache, has this data set."""
    name = path.removeprefix("hf://").partition(":")[0]
    # The hub answers a malformed name as it answers a private one: with "not found".
    if not HUB_NAME.fullmatch(name):
        yield f"{key}: {path!r} is no data set's name on the hub; write hf://owner/name or hf://owner/name:split"
        return
    from huggingface_hub.constants import HF_HOME

    # `datasets` names the folder of a data set so.
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    _, problem = ask_hub("data set", name, cached=(cache / name.replace("/", "___")).exists())
    if problem:
        yield f"{key}: {path}: {problem}, and name a local file or folder"


def _server_arguments(config: Config) -> Iterator[str]:
    """Yield arguments that SGLang does not know, by their names only, where it is installed.

    An engine would refuse them after Ray has started.
    """
    server_args = (
        config.rollout.sglang.server_args if config.rollout.rollout_backend == "sglang" else {}
    )
    if server_args and (known_names := _server_argument_names()):
        for name in server_args.keys() - known_names:
            yield (
                f"rollout.sglang.server_args: SGLang has no argument {name!r}; write it as in its "
                f"ServerArgs, with underscores;{nearest(str(name), sorted(known_names))}"
            ).rstrip(";")


def _folders(config: Config) -> Iterator[str]:
    """Yield folders that can't be written, stores that can't be reached, and bad checkpoints."""
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
    checkpoint_dir = runner.checkpoint_dir
    if (
        checkpoint_dir
        and "://" not in checkpoint_dir
        and (reason := _unwritable(Path(checkpoint_dir)))
    ):
        yield f"runner.checkpoint_dir: {checkpoint_dir!r} can't be written ({reason}); name another folder"
    resume_dir = runner.resume_dir
    if resume_dir is not None and resume_dir != "auto" and os.path.isdir(resume_dir):
        # A run's folder means its newest checkpoint.
        resumed = str(newest_checkpoint(Path(resume_dir)) or resume_dir)
        # The controller and the ranks write these files of a checkpoint last.
        files = [STATE_FILE, f"{ACTOR_FOLDER}/.metadata"]
        if missing_files := [name for name in files if not os.path.isfile(Path(resumed) / name)]:
            yield (
                f"runner.resume_dir: {resumed!r} is no complete checkpoint (no "
                f"{missing_files[0]} in it); name a checkpoints/global_step_N folder of a run, or "
                "auto"
            )
    uses_toy = not TOYS.keys().isdisjoint(
        [config.rollout.model.model_path, *data.train_data_paths, *data.val_data_paths]
    )
    if (uses_toy or data.image_hosts) and (reason := _unwritable(cache)):
        yield f"the cache folder {cache} can't be written ({reason}); set RLINF_VL_CACHE to another one"


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, which may not exist yet; None if it can.

    Nothing is left behind.
    """
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        return f"{str(folder)!r}: {getattr(error, 'strerror', None) or error}"
    # The nearest folder that exists decides: the others will be made in it.
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _server_argument_names() -> set[str]:
    """Return the names of SGLang's server arguments.

    They are read from its sources, because importing it takes half a minute. The set is empty if
    SGLang is not installed, or if a newer version defines them elsewhere.
    """
    spec = importlib.util.find_spec("sglang")
    names = set()
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in Path(folder).glob("srt/arg_groups/fields/*.py"):
            for node in ast.parse(file.read_text("utf-8")).body:
                fields = node.body if isinstance(node, ast.ClassDef) else ()
                targets = (field.target for field in fields if isinstance(field, ast.AnnAssign))
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _gpus(config: Config) -> Iterator[str]:
    """Yield the problems of a private cluster's GPUs.

    GPUs of a cluster that the run joins are checked after it has joined.
    """
    if (
        config.cluster.device != "cuda"
        or not gpus.is_private(config)
        or (gpu_sizes := gpus.gpu_memory()) is None
    ):
        return
    if not gpu_sizes:
        yield (
            "cluster.device: cuda, but there is no CUDA device here (the driver shows none, or "
            "CUDA_VISIBLE_DEVICES hides them); run it where nvidia-smi shows one, or set "
            "cluster.device=cpu"
        )
        return
    try:
        placement_of(config, (len(gpu_sizes),))
    except ConfigError as error:
        yield from error.problems


def _rewards(config: Config) -> Iterator[str]:
    """Yield the problems of the reward functions.

    They are imported, so that one that can't be called shows before Ray starts.
    """
    reward = config.reward
    for number, entry in enumerate(reward.entries):
        name, kwargs = entry.get("function"), entry.get("kwargs", {})
        if not isinstance(name, str) or not isinstance(kwargs, dict):
            continue  # another rule reports these
        key = f"reward.functions[{number}]" if reward.functions else "reward.reward_type"
        try:
            if is_code(name):
                check_code(
                    name, {}, config.runner.code_files, kind="reward function", signature=SIGNATURE
                )
                load_function(name, kwargs, config.runner.code_files)
            else:
                named_function(name, kwargs, reward.judge_hosts)
        except CodeError as error:
            yield f"{key}: {error}"


#: Rules on everything that a config names: their problems would stop its run on this machine.
RULES = [
    _data,
    _environment,
    _agent,
    _rewards,
    checkpoint,
    teachers,
    _server_arguments,
    _folders,
    _gpus,
]
#: What must hold before a run or an evaluation starts.
START_RULES = [packages_missing, *RULES]
#: Rules on the data, the graders and the model whose tokens are counted.
DATA_RULES = [partial(_data, with_rows=False), _rewards, checkpoint]
