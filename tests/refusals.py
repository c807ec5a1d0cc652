"""The table of refusals, tests/golden/refusals.txt: each message with which config, data and checks refuse something.

    python tests/refusals.py            renders every case anew; read the difference before it is committed
    python tests/refusals.py NAME …     renders the cases whose names begin so

A case is its name behind `==`, one line that provokes the refusal, and the message. A line that begins with `$` is typed on the
command line, in a folder of the files below, on a machine without GPUs and optional packages unless variables before it say
otherwise; one that begins with `>>>` is an expression of Python, with the names of tests/refused_values.py. A new case is a name
and such a line.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import tempfile
import types
import unittest.mock
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import refused_values
from omegaconf import OmegaConf
from PIL import Image

from rlinf_vl import __main__ as command_line
from rlinf_vl.config import Config, config_keys, imitation, load
from rlinf_vl.config.overrides import apply_overrides
from rlinf_vl.driver import entry
from rlinf_vl.engines.sglang import machine as sglang_machine
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.verifiers import rows as verifiers_rows
from rlinf_vl.runtime import gpus
from rlinf_vl.tools.check.hub import ask_hub

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/golden/refusals.txt"
TOY = "toy-grpo-cpu"
#: Packages that the machine lacks unless INSTALLED names them.
OPTIONAL = {"wandb", "trackio", "peft", "bitsandbytes"}
AGENTS_MODULES = {"uvicorn", "starlette.applications", "openai", "httpx"}


class Case(NamedTuple):
    """A case of the table: what provokes the message, and the message."""

    name: str
    provoked_by: str
    message: str


def read_table() -> list[Case]:
    """Return the cases of the table, in its order."""
    cases = []
    for block in TABLE.read_text(encoding="utf-8").split("\n== ")[1:]:
        name, provoked_by, *message = block.rstrip("\n").split("\n")
        cases.append(Case(name, provoked_by, "\n".join(message)))
    return cases


def write_table(cases: Iterable[Case]) -> None:
    """Write the cases below the table's first lines."""
    head = TABLE.read_text(encoding="utf-8").partition("\n== ")[0].rstrip("\n")
    blocks = [f"== {case.name}\n{case.provoked_by}\n{case.message}\n" for case in cases]
    TABLE.write_text("\n".join([f"{head}\n", *blocks]), encoding="utf-8")


class Renderer:
    """Renders cases in a folder of their files. A context manager: its folder is the working folder meanwhile.

    Configs are parsed by `parse_quickly`, unless `quick` is false.
    """

    def __init__(self, quick: bool = True) -> None:
        self._quick = quick

    def __enter__(self) -> "Renderer":
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
            write_files(self.folder)
            stack.enter_context(contextlib.chdir(self.folder))
            stack.enter_context(unittest.mock.patch.dict(os.environ))
            # Importing these takes longer than all cases; tests/unit/config/test_refusals.py imports them.
            stack.enter_context(
                unittest.mock.patch.object(importlib, "import_module", _import_quickly)
            )
            # Which the command line adds the working folder to.
            stack.enter_context(unittest.mock.patch.object(sys, "path", [*sys.path]))
            for name in ("CUDA_HOME", "RAY_ADDRESS"):
                os.environ.pop(name, None)
            os.environ["RLINF_VL_CACHE"] = str(self.folder / "cache")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def render(self, case: Case) -> Case:
        """Return the case with the message as it is now."""
        mark, _, text = case.provoked_by.partition(" ")
        message = self._typed(text) if mark == "$" else self._evaluated(text)
        return case._replace(message=self._independent(message))

    def _typed(self, line: str) -> str:
        """Return what the command line says of a line."""
        line = re.sub(r"x\{(\d+)\}", lambda match: "x" * int(match[1]), line)
        words, variables = shlex.split(line.replace("FILES", str(self.folder))), {}
        while re.match("[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            machine(self._quick, **variables),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            try:
                code = command_line.main(words)
            except SystemExit as end:
                code = end.code
        text = stderr.getvalue() if stderr.getvalue().strip() else stdout.getvalue()
        assert code, f"not refused: {line}\n{text}"
        assert "Traceback" not in text, text
        return text

    def _evaluated(self, expression: str) -> str:
        """Return the error of an expression, or its value if that is a text or several."""
        try:
            value = eval(expression, vars(refused_values) | {"FILES": self.folder})  # noqa: S307
        except Exception as error:
            kind = f" ({error.kind})" if isinstance(getattr(error, "kind", None), str) else ""
            return f"{type(error).__name__}{kind}: {error}"
        lines = [value] if isinstance(value, str) else list(value)
        assert lines, f"not refused: {expression}"
        return "\n".join(map(str, lines))

    def _independent(self, text: str) -> str:
        """Return a message without what depends on the machine."""
        for path, name in (
            (str(self.folder), "FILES"),
            (sys.executable, "python"),
            (sys.prefix, "VENV"),
            (str(ROOT), "REPOSITORY"),
        ):
            text = text.replace(path, name)
        text = re.sub("x{40,}", lambda match: f"x{{{len(match[0])}}}", text)
        text = re.sub(r"(memory|room in /dev/shm), \d+", r"\1, …", text)
        # Encoders differ.
        text = re.sub(r"ends after [\d.]+ s", "ends after … s", text)
        text = re.sub(r"image [\da-f]{12}\b", "image …", text)
        # An example more changes no message.
        text = re.sub(r"([\w.-]+, ){4,}[\w.-]+", _without_examples, text)
        return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _import_quickly(name: str, package: str | None = None) -> object:
    return None if name in AGENTS_MODULES else _import_module(name, package)


def _without_examples(names: re.Match) -> str:
    if TOY not in names[0].split(", "):
        return names[0]
    return "…, and" if names[0].endswith(", and") else "…"


@contextlib.contextmanager
def machine(quick: bool = True, **variables: str) -> Iterator[None]:
    """Make this process one on a machine with these properties; other variables are set as they are.

    GPUS: number of GPUs of 80 GB. INSTALLED: optional packages, and sglang or verifiers with =VERSION.
    """
    installed = dict(
        name.partition("=")[::2] for name in variables.pop("INSTALLED", "").split(",") if name
    )
    n_gpus, find_spec = int(variables.pop("GPUS", 0)), importlib.util.find_spec

    def version_of(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    def spec(name: str, *package: str) -> object:
        return None if name in OPTIONAL - installed.keys() else find_spec(name, *package)

    def launched(*_: object, **__: object) -> None:
        return None

    patch = unittest.mock.patch.object
    ask_hub.cache_clear()
    hub_answer = variables.pop("HUB", None)
    with (
        unittest.mock.patch.dict(os.environ, variables),
        patch(gpus, "gpu_memory", lambda: (80 * 2**30,) * n_gpus),
        patch(importlib.util, "find_spec", spec),
        patch(sglang_machine, "version", version_of),
        patch(verifiers_rows, "version", version_of),
        patch(entry, "launch_training", launched),
        patch(command_line, "parse", parse_words if quick else _parse),
        patch(load, "parse_config", parse_quickly if quick else _parse_config),
        patch(imitation, "parse_config", parse_quickly if quick else _parse_config),
        hub(hub_answer),
    ):
        yield


@contextlib.contextmanager
def hub(answer: str | None) -> Iterator[None]:
    """Let the hub have a model of the type `answer`; or be "unreachable", or say "missing" or "gated" of every name."""
    if answer is None:
        yield
        return
    import huggingface_hub.errors

    errors = huggingface_hub.errors
    kinds = {"missing": errors.RepositoryNotFoundError, "gated": errors.GatedRepoError}

    def info(*_: object, **__: object) -> object:
        if answer == "unreachable":
            raise OSError("no route to it")
        if answer in kinds:
            raise kinds[answer].__new__(kinds[answer])
        return types.SimpleNamespace(config={"model_type": answer})

    patch = unittest.mock.patch.object
    with (
        patch(huggingface_hub.HfApi, "model_info", info),
        patch(huggingface_hub.HfApi, "dataset_info", info),
    ):
        yield


_parse, _parse_config, _select = command_line.parse, load.parse_config, OmegaConf.select
_import_module = importlib.import_module


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse words as the command line does; for `train` without options no parser of all verbs is made."""
    if words[0] != "train" or any(word.startswith("-") for word in words):
        return _parse(words)
    verb, config, *overrides = words
    return argparse.Namespace(
        verb=verb, config=config, overrides=overrides, check=False, multirun=False
    )


@functools.cache
def _toy() -> tuple[Path, dict, object]:
    """Return the toy's file, what it writes, and the schema filled with it, which takes most of a config's time."""
    path = load._find(TOY)
    written, typed = load._compose(path), OmegaConf.structured(Config)
    assert not load._fill(typed, written)
    return path, written, typed


def parse_quickly(config_name: str, overrides: Sequence = ()) -> Config:
    """Parse a config as `parse_config` does; of the toy's, only what overrides change is filled in."""
    if config_name != TOY:
        return _parse_config(config_name, overrides)
    path, toy, typed = _toy()
    written = copy.deepcopy(toy)
    problems = apply_overrides(written, overrides)
    changed = {key: value for key, value in written.items() if key not in toy or toy[key] != value}
    # An override that chooses another preset takes keys of the file away.
    changed |= {key: config_keys()[key].default for key in toy.keys() - written.keys()}

    def select(filled: object, key: str, **keywords: object) -> object:
        return _select(filled, key, **keywords) if key in changed else None

    try:
        # What the toy's file says has been looked at.
        with unittest.mock.patch.object(OmegaConf, "select", select):
            problems += load._fill(typed, changed)
        if problems:
            raise ConfigError(*problems)
        config = OmegaConf.to_object(typed)
    finally:
        for key in changed.keys() & config_keys().keys():
            load.set_key(typed, key, toy.get(key, config_keys()[key].default))
    load._normalise(config, path.parent)
    return config


ROW = {"problem": "1 + 1?", "answer": "2"}
IN_SIGHT = {"problem": "<image>What?", "answer": "2", "images": ["ok.png"]}
OWN = """defaults: [toy-grpo-cpu]
runner:
  experiment_name: own
data:
  train_data_paths: good.jsonl
  val_data_paths: []
  image_keys: []
"""
CODE = """import torch
def score(response, answer, **row): return 1.0
def nothing(): return 1
VALUE = 3
class Env:
    def start(self): ...
    def step(self, response): ...
    def close(self): ...
"""


def rows(row: dict = ROW, n: int = 40, **cells: object) -> str:
    return "\n".join([json.dumps(row | cells)] * n)


FILES = {
    "good.jsonl": rows(),
    "few.jsonl": rows(n=1),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "numbers.jsonl": "1\n2\n",
    "broken.jsonl": f'{json.dumps(ROW)}\n{{"problem": \n',
    "array.json": json.dumps([ROW, ROW])[:-5],
    "object.json": "{}",
    "videos.jsonl": rows(problem="What happens in <video>?"),
    "videos.json": json.dumps(
        [{"messages": [{"role": "user", "content": [{"type": "video"}]}], "answer": "2"}] * 20
    ),
    "verl.jsonl": rows({"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}),
    "talks.jsonl": rows(
        {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}
    ),
    "nowhere.jsonl": rows(IN_SIGHT, images=["images/1.png"]),
    "torn.jsonl": rows(IN_SIGHT, images=["torn.png"]),
    "counts.jsonl": rows(IN_SIGHT, problem="<image><image>What?"),
    "unanswered.jsonl": rows(answer=None),
    "unasked.jsonl": rows(problem=""),
    "table.csv": "problem,answer\n1 + 1?,2\n",
    "other-names.csv": "question,solution\n1 + 1?,2\n",
    "empty.csv": "",
    "heading.csv": "problem,answer\n",
    "ragged.csv": "problem,answer\n1 + 1?,2\n1,2,3,4\n",
    "latin.csv": b"problem,answer\n" + b"caf\xe9?,2\n" * 40,
    "twice.csv": "problem,answer,answer\n1?,1,1\n",
    "open.csv": 'problem,answer\n"1?,1\n',
    "odd.tsv": "problem\tanswer\n1?\t1\t1\n",
    "levels.csv": "problem,answer,level\n1?,1,easy\n",
    "spoilt/state.json": "{}",
    "torn.mp4": "12345",
    "nothing.mp4": "",
    "bad.parquet": "PAR1, or so",
    "empty.parquet": "",
    "sums.xlsx": b"PK\x03\x04",
    "texts/one.txt": "1 + 1?",
    "folder/train.jsonl": rows(),
    "folder/README.md": "Sums.",
    "parts/good.jsonl": rows(),
    "parts/broken.jsonl": "1\n",
    "torn.png": b"\x89PNG",
    "sglang/__init__.py": "raise AssertionError('imported')",
    "sglang/srt/arg_groups/fields/memory.py": "class Memory:\n    disable_radix_cache: bool = False\n"
    "    ep_size: int = 1\n    attn_dp_size: int = 1\n",
    "torn/bitsandbytes.py": "raise ImportError('built for another torch')",
    "none": "x",
    "a-file": "",
    "own.yaml": OWN,
    "own.yml": OWN,
    "run.sh": "python -m trl.cli grpo",
    "rlinf.yaml": "runner: {task_type: math}\nfoo: {bar: 1}\nnothing: 5\n",
    "base-typo.yaml": OWN.replace("toy-grpo-cpu", "toy-grpo-cp"),
    "tab.yaml": OWN.replace("  experiment_name", "\texperiment_name"),
    "key.yaml": OWN.replace("experiment_name", "experimnt_name"),
    "section.yaml": OWN + "trainer:\n  n_gpus: 2\n",
    "type.yaml": OWN + "algorithm:\n  group_size: eight\n",
    "twice.yaml": OWN + "data:\n  seed: 3\n",
    "open.yaml": "runner:\n  max_steps: [3\n",
    "picture.yaml": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "list.yaml": "- a\n",
    "empty.yaml": "",
    "circle.yaml": "defaults: [circle]\n",
    "configs/toy-grpo-cpu.yaml": "defaults: [toy-grpo-cpu]\n",
    "text-base.yaml": "defaults: toy-grpo-cpu\n",
    "refers.yaml": OWN + "actor:\n  optim: {lr: '${learning_rate}'}\n",
    "mistakes.yaml": "defaults: [rlinf_vl_schema, _self_]\nrunner: {sed: 1, max_steps: abc}\n"
    "actor: {optim: {learn_rate: 1, deep: {er: 2}}}\nfoo: {bar: 3}\nalgorithm: 5\n",
    "half.yaml": OWN + "actor:\n  optim: {lr: '${data.seed'}\n",
    "folder.yaml/x": "",
    "code.py": CODE,
    "agent.py": "async def solve(task, client): return 1.0\n",
    "values.py": "WORDS = ['a']\n\ndef slow(response, answer): return 1\n",
    "losses.py": "import torch\n\ndef raises(inputs): raise KeyError('x')\n\ndef alone(inputs): return torch.zeros(8)\n\n"
    "def endless(inputs): return inputs.logprobs * float('nan')\n\ndef opened(run): raise OSError('no server')\n\n"
    "def mean(inputs): return (-inputs.ratio() * inputs.advantages).mean()\n\n"
    "def misspells(inputs): return -inputs.ration()\n\n"
    "def of_groups(rewards, group_ids, tokens): return rewards.unique()\n\n"
    "def divides(rewards, group_ids, tokens): return torch.cat([r / r.std() for r in rewards.split(4)])\n",
    "env.py": "class Env:\n    def __init__(self, turns=1): ...\n    def start(self, problem): ...\n"
    "    def step(self, response): ...\n    def close(self): ...\n",
    "notes.sh": "just words\n",
    "seed.yaml": "x: 1\n",
    "foreign.yaml": "defaults: [toy-grpo-cpu]\nactor_rollout_ref: {rollout: {n: 5}, actor: {ppo_epochs: 2, grad_clip: 1.0}}\n",
    "counterpart.yaml": "runner: {task_type: reasoning}\nreward: {reward_type: mine}\nrollout: {enforce_eager: true}\n"
    "algorithm: {ratio_clip_eps: 0.2}\n",
    "rloo.sh": "trl rloo --model_name_or_path m --beta 0.1 --dataset_name d\n",
    "rloo.py": "RLOOTrainer(model='m', args=RLOOConfig(beta=0.1), reward_funcs=f)\n",
    "easyr1.yaml": "data: {train_files: a@train}\nworker: {actor: {global_batch_size: 8}, rollout: {n: 5}}\n",
    "nothing.txt": "\n\n",
    "syntax.py": "def score(response, answer:\n    return 1\n",
    "raises.py": "def score(response, answer): return 1.0\n1 / 0\n",
    "reward.py": "def one(text): return 1.0\n\ndef fine(response, answer, least=1): return 1.0\n\nx = 1\n",
    "llama/config.json": '{"model_type": "llama"}',
    "windowed/config.json": '{"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 8}}',
    "odd/config.json": '{"model_type": "qwen3_vl_moe", "vision_config": "none", "text_config": []}',
    "windows/config.json": '{"model_type": "qwen2_5_vl", "text_config": {"use_sliding_window": true}}',
    "experts/config.json": '{"model_type": "qwen3_vl_moe", "text_config": {"num_local_experts": 4, "hidden_size": 32, '
    '"moe_intermediate_size": 12}}',
    "dense/config.json": '{"model_type": "qwen3_vl", "text_config": {"hidden_size": 32, "num_attention_heads": 6}}',
    "text/config.json": '{"model_type": "qwen3"}',
    "bare/config.json": '{"model_type": "qwen3_vl"}',
    "broken/config.json": '{"model_type": ',
    "no-config/README.md": "",
    "shards/config.json": '{"model_type": "qwen3_vl"}',
    "shards/model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
    "shards/model-1.safetensors": "",
    "shards/tokenizer.json": "",
    "shards/preprocessor_config.json": "[]",
    "pointers/config.json": '{"model_type": "qwen3_vl"}',
    "pointers/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 4000000\n",
    "pointers/tokenizer.json": "version https://git-lfs.github.com/spec/v1\n",
    "pointers/preprocessor_config.json": "{}",
    "llava/config.json": '{"model_type": "llava"}',
    "uneven/config.json": '{"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 30}}',
    "checkpoint/README.md": "",
    "copied/controller.json": '{"step": 2}',
    "copied/actor/__0_0.distcp": "",
}


def write_files(folder: Path) -> None:
    """Write the files that the cases name; most are wrong in one way."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "nothing-in-it").mkdir()
    # Two checkpoints that lack nothing, with tokenizers that differ.
    for name, tokens in (("sound", {"a": 0, "b": 1}), ("foreign", {"a": 0, "b": 2})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "qwen3_vl"}')
        (folder / name / "model.safetensors").write_bytes(bytes(20))
        (folder / name / "preprocessor_config.json").write_text("{}")
        tokenizer = {"model": {"vocab": tokens}, "added_tokens": []}
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "pictures/red").mkdir(parents=True)
    for name in ("ok.png", "pictures/red/1.png"):
        Image.new("RGB", (40, 40)).save(folder / name)
    tables = {
        "other-names.parquet": {"question": ["1 + 1?"] * 20, "answer": ["2"] * 20},
        "clips.parquet": {
            name: [cell] * 20 for name, cell in (ROW | {"videos": ["a.mp4"]}).items()
        },
        "no-rows.parquet": {name: pa.array([], pa.string()) for name in ROW},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / name)


def main(names: Sequence[str]) -> None:
    """Render the cases whose names begin with one of `names`, or all, and write the table."""
    with Renderer() as renderer:
        cases = [
            renderer.render(case) if case.name.startswith(tuple(names) or "") else case
            for case in read_table()
        ]
    write_table(cases)
    print(f"{TABLE}: {len(cases)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])
