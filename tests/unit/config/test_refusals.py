"""What a new user gets wrong, as the command line tells it: in one message, with the way out, before Ray or torch are imported."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf_vl import __main__ as command_line
from rlinf_vl import entry
from rlinf_vl.config import config_keys
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.sources import peek
from rlinf_vl.engines.sglang import machine as sglang_machine
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.preflight import gpus, inputs
from rlinf_vl.runtime.checkpoints import STATE_FILE
from rlinf_vl.toy.task import toy_dataset_path, toy_of

ROOT = Path(__file__).resolve().parents[3]
NO_IMAGES = "data.image_keys=[]"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder of data and models, most of them wrong in one way."""
    folder = tmp_path_factory.mktemp("files")
    row = {"problem": "1 + 1?", "answer": "2"}
    text = {
        "good.jsonl": "\n".join([json.dumps(row)] * 20),
        "videos.jsonl": "\n".join([json.dumps(row | {"problem": "What happens in <video>?"})] * 20),
        "videos.json": json.dumps(
            [{"messages": [{"role": "user", "content": [{"type": "video"}]}], "answer": "2"}] * 20
        ),
        "few.jsonl": "\n".join([json.dumps(row)] * 5),
        "broken.jsonl": json.dumps(row) + '\n\n{"problem": "1 + 1?", "answ\n',
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "array.json": json.dumps([row, row])[:-5],
        "numbers.json": "[1, 2]",
        "table.csv": "problem,answer\n1 + 1?,2\n",
        "odd.csv": "problem,answer\n1 + 1?,2\n1, 2 or 3?,1\n",
        "sums.xlsx": "1 + 1?",
        "verl.jsonl": "\n".join(
            [json.dumps({"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}})] * 20
        ),
        "reward.py": "def one(text): return 1.0\n\ndef fine(response, answer, least=1): return 1.0\n\nx = 1\n",
        "broken_reward.py": "def f(response, answer)\n    return 1.0\n",
        "none": "x",
        "bad.parquet": "PAR1, or so",
        "empty.parquet": "",
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
        "texts/one.txt": "1 + 1?",
        "folder/train.jsonl": json.dumps(row),
        "folder/README.md": "Sums.",
        "checkpoint/README.md": "",
        "copied/controller.json": '{"step": 2}',
        "copied/actor/__0_0.distcp": "",
        "a-file": "",
    }
    for name, content in text.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "nothing-in-it").mkdir()
    pq.write_table(
        pa.table({"question": ["1 + 1?"] * 20, "answer": ["2"] * 20}),
        folder / "other-names.parquet",
    )
    clips = {"problem": ["1 + 1?"] * 20, "answer": ["2"] * 20, "videos": [["a.mp4"]] * 20}
    pq.write_table(pa.table(clips), folder / "clips.parquet")
    pq.write_table(
        pa.table({name: pa.array([], pa.string()) for name in row}), folder / "no-rows.parquet"
    )
    return folder


def train_on(name: str) -> str:
    return f"data.train_data_paths=[FILES/{name}]"


MISTAKES: list[tuple[list[str], list[str]]] = [
    # ranks
    (
        ["rollout.model.model_path=FILES/dense", "actor.context_parallel_size=4"]
        + ["cluster.component_placement={actor: 0-3, rollout: 0}"],
        ["actor.context_parallel_size: 4 can't divide the 6 heads (num_attention_heads)", "these can: 1, 2, 3, 6"],
    ),
    # engines of several slots
    (
        ["rollout.model.model_path=FILES/dense", "rollout.rollout_backend=sglang", "rollout.tensor_parallel_size=4"]
        + ["rollout.sglang.ep_size=2", "cluster.component_placement={actor: 0-3, rollout: 0-3}"],
        ["rollout.tensor_parallel_size: 4 equal parts of 6 (num_attention_heads)", "rollout.sglang.ep_size: 2", "has no experts"],
    ),
    (
        ["rollout.model.model_path=FILES/experts", "rollout.rollout_backend=sglang", "rollout.tensor_parallel_size=8"]
        + ["cluster.component_placement={actor: 0-7, rollout: 0-7}"],
        ["rollout.tensor_parallel_size: 8 equal parts of 12 (moe_intermediate_size)"],
    ),
    (
        ["rollout.rollout_backend=sglang", "rollout.tensor_parallel_size=2", "rollout.sglang.attn_dp_size=4"],
        ["rollout.sglang.attn_dp_size: 4 does not divide the 2 slots of an engine"],
    ),
    # data
    ([train_on("videos.jsonl"), NO_IMAGES], ["data.train_data_paths: FILES/videos.jsonl: 20 of the first 20 rows can't be used"]),
    ([train_on("videos.json"), NO_IMAGES, "data.prompt_key=messages"], ["FILES/videos.json: 20 of", "1 <video> and the row 0"]),
    ([train_on("clips.parquet"), NO_IMAGES], ["FILES/clips.parquet: 20 of", "video 0: 'a.mp4' is neither base64"]),
    ([train_on("good.jsonl")], ["data.image_keys: column 'images' not in FILES/good.jsonl", "data.image_keys=[]"]),
    ([train_on("good.jsonl"), NO_IMAGES, "data.prompt_key=problm"], ["data.prompt_key: column 'problm'", "'problem'?"]),
    ([train_on("other-names.parquet"), NO_IMAGES], ["data.prompt_key: column 'problem'", "columns are answer, question"]),
    ([train_on("few.jsonl"), NO_IMAGES], ["data.rollout_batch_size: 16", "has 5 rows", "set it to 5 or less"]),
    (["data.rollout_batch_size=10000"], ["data.rollout_batch_size: 10000", "has 5440 rows"]),
    ([train_on("broken.jsonl"), NO_IMAGES], ["data.train_data_paths: FILES/broken.jsonl line 3", "repair or delete"]),
    ([train_on("empty.jsonl")], ["data.train_data_paths: FILES/empty.jsonl is empty", "leave it out"]),
    ([train_on("blank.jsonl")], ["data.train_data_paths: FILES/blank.jsonl is empty", "leave it out"]),
    ([train_on("array.json")], ["data.train_data_paths: FILES/array.json is no JSON array", "in line 1", "repair"]),
    ([train_on("numbers.json")], ["FILES/numbers.json item 1 is 1, not an object", "repair"]),
    ([train_on("table.csv")], ["data.image_keys: column 'images' not in FILES/table.csv", "data.image_keys=[]"]),
    ([train_on("odd.csv")], ["FILES/odd.csv line 3 has 3 cells, the first line 2", "in double quotes"]),
    ([train_on("sums.xlsx")], ["FILES/sums.xlsx has suffix '.xlsx'", ".parquet, .json, .jsonl, .csv, .tsv", "convert"]),
    ([train_on("verl.jsonl"), "data.format=rlinf"], ["data.prompt_key: column 'problem'", "columns are prompt, reward_model"]),
    ([train_on("good.jsonl"), "data.format=verl"], ["data.prompt_key: column 'prompt'", "data.answer_key: column 'reward_model'"]),
    ([train_on("verl.jsonl"), "data.curriculum_key=extra_info.level"], ["data.curriculum_key: column 'extra_info' not in"]),
    (["data.format=openrhlf"], ["data.format: 'openrhlf' is unknown; allowed: auto, rlinf, verl,", "did you mean 'openrlhf'?"]),
    (["data.weights=[1,2]"], ["data.weights: 2 for 1 data.train_data_paths; write one for each"]),
    (["data.image_root=FILES/gone"], ["data.image_root: no folder 'FILES/gone'", "image paths start in"]),
    ([train_on("none")], ["FILES/none has suffix ''", "convert"]),
    ([train_on("bad.parquet")], ["FILES/bad.parquet is no parquet file", "write it anew"]),
    ([train_on("empty.parquet")], ["FILES/empty.parquet is empty", "leave it out"]),
    ([train_on("no-rows.parquet")], ["FILES/no-rows.parquet is empty", "leave it out"]),
    ([train_on("nothing-in-it")], ["FILES/nothing-in-it holds no files", "name a folder"]),
    ([train_on("texts")], ["FILES/texts holds no file of rows (.parquet, .json, .jsonl, .csv, .tsv)", "name a folder"]),
    ([train_on("folder"), NO_IMAGES, "data.answer_key=answr"], ["data.answer_key: column 'answr' not in FILES/folder", "'answer'?"]),
    (["data.train_data_paths=[seeds://many]", NO_IMAGES], ["data.train_data_paths: seeds://many names no number of rows"]),
    (["data.train_data_paths=[seeds://8]", NO_IMAGES], ["data.rollout_batch_size: 16", "has 8 rows", "set it to 8 or less"]),
    (["data.train_data_paths=['']"], ["data.train_data_paths: no file ''"]),
    (["data.train_data_paths=['https://a.org/x.parquet']"], ["no file 'https://a.org/x.parquet'", "hf://owner/name"]),
    (["data.train_data_paths=['~nobody-at-all/x']"], ["data.train_data_paths: no file '", "~nobody-at-all/x'"]),
    ([f"data.train_data_paths=[/tmp/{'x' * 300}]"], ["data.train_data_paths: no file '/tmp/xxx", "(File name too long)"]),
    (["data.val_data_paths=[FILES/gone.jsonl]"], ["data.val_data_paths: no file 'FILES/gone.jsonl'", "hf://"]),
    (["data.train_data_paths=[owner/name]"], ["data.train_data_paths: no file", "hf://owner/name"]),
    (["data.train_data_paths=[hf://]"], ["data.train_data_paths: 'hf://'", "hf://owner/name:split"]),
    (["data.train_data_paths=3"], ["data.train_data_paths: 3 is not a list of strings, such as [a, b]"]),
    (["rollout.env_class=null"], ["env_class: null is not a string; leave it out for its default, 'single_turn'"]),
    (["data.image_keys=3"], ["data.image_keys: 3 is not a list", "[a, b]"]),
    (["data.image_keys=[image]"], ["data.image_keys: column 'image' not in toy", "did you mean 'images'?"]),
    (["data.prompt_key="], ["data.prompt_key: column ''", "columns are answer"]),
    # model
    (["rollout.model.model_path=FILES/gone"], ["rollout.model.model_path: no folder 'FILES/gone'", "or toy"]),
    (["rollout.model.model_path=./gone"], ["rollout.model.model_path: no folder './gone'", "hub (owner/name)"]),
    (["rollout.model.model_path="], ["rollout.model.model_path: empty", "give a checkpoint's folder"]),
    (["rollout.model.model_path=FILES/no-config"], ["rollout.model.model_path: FILES/no-config has no config.json", "name a"]),
    (["rollout.model.model_path=FILES/broken"], ["rollout.model.model_path: FILES/broken has no config.json that", "name a"]),
    (["rollout.model.model_path=FILES/llama"], ["the checkpoint at FILES/llama is of type 'llama'", "supported: qwen2_5_vl"]),
    (
        ["rollout.model.model_path=FILES/windowed", "rollout.rollout_backend=sglang"],
        ["FILES/windowed: SGLang can't run this qwen2_5_vl", "patch_size 8", "set rollout.rollout_backend=torch"],
    ),
    (
        ["rollout.model.model_path=toy-qwen3_5", "rollout.rollout_backend=sglang", "cluster.device=cpu"],
        ["toy-qwen3_5: SGLang can't run this qwen3_5: its gated delta nets", "need a GPU; set rollout.rollout_backend=torch"],
    ),
    (["rollout.model.model_path=FILES/odd", "rollout.rollout_backend=sglang"], ["FILES/odd lacks weights"]),
    (
        ["rollout.model.model_path=FILES/text", "actor.model.freeze_language_model=true", "actor.model.freeze_vision_tower=false"],
        [
            "data.image_keys: ['images'], but the checkpoint at FILES/text is of type 'qwen3', which has no vision tower",
            "set data.image_keys=[]", "actor.model.freeze_language_model: true leaves nothing to train",
            "FILES/text lacks weights (*.safetensors), a tokenizer",
        ],
    ),
    (["actor.model.vlm.vision_encoder_attr=model.visual"], ["vision_encoder_attr=model.visual", "both, or neither"]),
    (
        ["actor.model.vlm.vision_encoder_attr=model.visul", "actor.model.vlm.language_model_attr=model.language_model"],
        ["actor.model.vlm.vision_encoder_attr: 'model.visul'", "no module 'visul'; it has visual, language_model"],
    ),
    (
        ["rollout.model.model_path=FILES/windows", "rollout.rollout_backend=sglang"],
        ["SGLang can't run this qwen2_5_vl: it leaves out the sliding windows of its layers", "rollout_backend=torch"],
    ),
    (
        ["rollout.model.model_path=FILES/experts", "rollout.model.precision=bf16"],
        ["rollout.model.precision: bf16, but the checkpoint at FILES/experts", "moe_intermediate_size 12", "of 8; set it fp32"],
    ),
    (
        ["rollout.model.model_path=FILES/dense", "actor.fsdp_config.expert_parallel_size=2"],
        ["actor.fsdp_config.expert_parallel_size: 2, but the checkpoint at FILES/dense", "that rlinf_vl computes; set it 1"],
    ),
    (
        ["rollout.model.model_path=FILES/experts", "actor.fsdp_config.expert_parallel_size=3"]
        + ["cluster.component_placement={actor: 0-2, rollout: 0}"],
        ["actor.fsdp_config.expert_parallel_size: 3 can't divide the 4 experts", "these can: 1, 2, 4"],
    ),
    (
        ["rollout.model.model_path=FILES/dense", "actor.routing_replay=replay"],
        ["actor.routing_replay: replay, but the checkpoint at FILES/dense", "that rlinf_vl computes; set it off"],
    ),
    (["rollout.model.model_path=FILES/bare"], ["FILES/bare lacks weights (*.safetensors), a tokenizer", "copy"]),
    (["rollout.model.model_path=FILES/shards"], ["FILES/shards lacks model-2.safetensors", "fetch or copy"]),
    (["rollout.model.model_path=FILES/pointers"], ["FILES/pointers: model.safetensors is damaged", "tokenizer.json is", "anew"]),
    ([f"rollout.model.model_path={'x' * 300}"], ["rollout.model.model_path: xxx", "nor a name that the hub allows", "owner/name"]),
    (["data.train_data_paths=[hf://a--b/c]"], ["data.train_data_paths: hf://a--b/c: neither", "owner/name"]),
    (["rollout.model.model_type=qwen2_vl"], ["rollout.model.model_type: 'qwen2_vl' is unknown", "'qwen2_5_vl'?"]),
    (["data.image_max_pixels=100"], ["data.image_max_pixels: 100", "256 pixels", "set it to 256 or more"]),
    (["data.image_max_pixels=0"], ["data.image_max_pixels: 0 must be at least 1"]),
    (["data.image_min_pixels=9", "data.image_max_pixels=4"], ["data.image_min_pixels=9", "=4; lower it"]),
    (["data.image_min_pixels=1000000"], ["data.image_min_pixels: 1000000", "3906 tokens", "data.max_prompt_length=512", "lower"]),
    # folders
    (["runner.output_dir=FILES/a-file"], ["runner.output_dir: 'FILES/a-file'", "Not a directory", "another folder"]),
    (["runner.output_dir=/proc/runs"], ["runner.output_dir: '/proc/runs'", "can't be written", "another folder"]),
    ([f"runner.experiment_name={'x' * 256}"], ["runner.experiment_name: 'xxx", "256 bytes", "shorten it"]),
    ([f"runner.output_dir={'x' * 300}"], ["runner.output_dir: 'xxx", "can't be written", "File name too long"]),
    (["runner.output_dir=~/runs"], ["override 'runner.output_dir=~/runs'", "write", "\"runner.output_dir='~/runs'\""]),
    (["runner.experiment_name=über"], ["can't be read", "\"runner.experiment_name='über'\""]),
    (["runner.experiment_name='a\nb'"], ["runner.experiment_name: 'a\\nb' is not a plain folder name"]),
    (["runner.resume_dir=FILES/checkpoint"], ["runner.resume_dir: 'FILES/checkpoint'", STATE_FILE, "global_step_N"]),
    (["runner.resume_dir=FILES/copied"], ["runner.resume_dir: 'FILES/copied'", "no actor/.metadata", "global_step_N"]),
    (["runner.resume_dir=FILES/gone"], ["runner.resume_dir: no folder 'FILES/gone'", "auto or null"]),
    # the machine
    (["cluster.object_store_memory=1000000000000000"], ["cluster.object_store_memory: 1000000000000000", "lower it"]),
    (["cluster.object_store_memory=1000"], ["cluster.object_store_memory: 1000 must be at least 78643200", "75 MiB"]),
    (["cluster.object_store_memory=2GB"], ["cluster.object_store_memory: '2GB' is not an integer or null"]),
    (["cluster.device=cuda"], ["cluster.device: cuda", "no CUDA device here", "set cluster.device=cpu"]),
    (["cluster.device=gpu"], ["cluster.device: 'gpu'", "auto, cpu, cuda"]),
    (["cluster.component_placement={actor: 0-x}"], ["cluster.component_placement", "'actor: 0-x'", "0-3 or 0-1,4"]),
    (["cluster.component_placement={actor: 0-99999999999}"], ["'actor: 0-99999999999' names a slot that no cluster has"]),
    (["rollout.rollout_backend=sglang"], ["rollout.rollout_backend: sglang is not installed", "install.sh --sglang"]),
    (["runner.logger.logger_backends=[wandb]"], ["runner.logger.logger_backends: wandb is not installed", "pip install"]),
    # single values
    (["algorithm.group_size=1"], ["algorithm.group_size: 1", "at least 2"]),
    (["algorithm.group_size=-4"], ["algorithm.group_size: -4 must be at least 1"]),
    (["algorithm.group_size=8.5"], ["algorithm.group_size: 8.5 is not an integer"]),
    (["algorithm.kl_beta=0.1", "algorithm.kl_penalty_type=k1"], ["kl_penalty_type: k1", "kl_beta=0.1", "use k2 or k3"]),
    (["algorithm.turn_discount=0.9"], ["algorithm.turn_discount: 0.9 with algorithm.credit=trajectory", "set credit=turn"]),
    (["algorithm.turn_discount=1.1"], ["algorithm.turn_discount: 1.1 must lie in [0, 1]"]),
    (
        ["algorithm.credit=turn", "algorithm.state_advantage_weight=1"],
        ["algorithm.state_advantage_weight: 1 adds to a trajectory's advantage (GiGPO)", "set credit=trajectory"],
    ),
    (["rollout.thinking.mode=true"], ["rollout.thinking.mode: on, but the chat template of toy doesn't know enable_thinking"]),
    (["rollout.thinking.mode=off", "rollout.model.model_path=FILES/bare"], ["rollout.thinking.mode: off", "FILES/bare"]),
    (["rollout.chat_template_kwargs={effort: low}"], ["rollout.chat_template_kwargs", "has no variable 'effort'"]),
    (["rollout.chat_template_kwargs={enable_thinking: true}"], ["enable_thinking=True; leave it out: set rollout.thinking.mode"]),
    (["rollout.chat_template_kwargs={tools: 1}"], ["tools=1; leave it out: the run sets it itself"]),
    (["algorithm.credit=turn", "rollout.max_turns=1"], ["algorithm.credit: turn with rollout.max_turns=1", "raise max_turns"]),
    (["algorithm.credit=step"], ["algorithm.credit: 'step'", "trajectory, turn"]),
    (["algorithm.entropy_bonus=nan"], ["algorithm.entropy_bonus: nan must be a finite number"]),
    (["reward.reward_type=mathe"], ["reward.reward_type: no reward function 'mathe'", "there are anls,", "did you mean 'math'"]),
    (["reward.functions=3"], ["reward.functions: 3 is not a list of mappings, such as [{function: math}]"]),
    (["reward.functions=mathe"], ["reward.functions[0]: no reward function 'mathe'", "did you mean 'math'"]),
    (["reward.functions=[{fuction: math}]"], ["reward.functions[0].fuction: unknown key", "did you mean 'function'"]),
    (["reward.functions=[{function: math, weight: much}]"], ["reward.functions[0].weight: 'much' must be a finite number"]),
    (["reward.functions=[{function: format, kwargs: {tag: [a]}}]"], ["functions[0]: 'format'", "takes no keyword 'tag'"]),
    (["reward.functions=[{function: overlong, kwargs: {buffer: 9}}]"], ["'overlong' needs kwargs: {max_tokens: …}"]),
    (["reward.functions=[{function: FILES/reward.py:on}]"], ["no function 'on' in FILES/reward.py", "did you mean 'one'"]),
    (["reward.reward_type=FILES/gone.py:f"], ["reward.reward_type: 'FILES/gone.py:f'", "no file", "give the path"]),
    (["reward.reward_type=FILES/reward.py:one"], ["one(text)", "fn(response, answer, **row)", "fn(completions, **columns)"]),
    (["reward.reward_type=FILES/reward.py:x"], ["no function 'x' in FILES/reward.py; its functions are one, fine"]),
    (["reward.reward_type=FILES/broken_reward.py:f"], ["broken_reward.py, line 1 can't be imported: SyntaxError"]),
    (["reward.functions=[{function: FILES/reward.py:fine, kwargs: {most: 2}}]"], ["takes no keyword 'most'", "leave it out"]),
    (
        ["reward.functions=[{function: judge, kwargs: {url: 'http://a.org/v1', model: m}}]"],
        ["host 'a.org' is not in reward.judge_hosts (none); list it there"],
    ),
    (["reward.timeout=0"], ["reward.timeout: 0.0 must be > 0"]),
    (["reward.reward_min_val=-inf"], ["reward.reward_min_val: -inf must be a finite number"]),
    (["actor.optim.lr=inf"], ["actor.optim.lr: inf must be a finite number"]),
    (["actor.optim.lr=1e-6x"], ["actor.optim.lr: '1e-6x' is not a number"]),
    (["runner.seed=99999999999999999999"], ["runner.seed: 99999999999999999999 must lie in [0, 2^63)"]),
    (["runner.seq_length=100"], ["data.max_prompt_length=512", "runner.seq_length=100", "lower it or raise"]),
    (["runner.max_steps=0"], ["runner.max_steps: 0 must be -1 or at least 1"]),
    (["runner.profile.steps=third"], ["runner.profile.steps: 'third' is not a list of integers, such as [1, 2]"]),
    (["data.answer_key=null"], ["data.answer_key: null is not a string"]),
    (["runner.max_step=3"], ["runner.max_step: unknown key (value 3)", "did you mean 'runner.max_steps'"]),
    (["runner.seed"], ["override 'runner.seed'", "write key=value"]),
]  # fmt: skip


def refused(capsys, files: Path, run: Callable[[list[str]], int], *overrides: str) -> str:
    """What the command line says of these overrides of the toy, where FILES is the folder of files."""
    code = run(
        ["train", "toy-grpo-cpu", *(text.replace("FILES", str(files)) for text in overrides)]
    )
    text = capsys.readouterr().err
    assert code == 2, text
    assert "Traceback" not in text and text.startswith("error: ")
    return text.replace(str(files), "FILES")


@pytest.fixture
def main(monkeypatch, tmp_path) -> Callable[[list[str]], int]:
    """The command line on a machine without GPUs, trackers and SGLang, which fails where it goes on to a run."""

    def goes_on(config):
        raise AssertionError("not refused")

    def not_installed(name):
        raise PackageNotFoundError(name)

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(entry, "prepare_toys", goes_on)
    # Tests/unit/rollout/test_rehearsal.py.
    monkeypatch.setattr(entry, "rehearse", lambda config: "ready")
    monkeypatch.setattr(gpus, "gpu_memory", lambda: ())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name)
    )
    monkeypatch.setattr(sglang_machine, "version", not_installed)
    monkeypatch.chdir(tmp_path)
    return command_line.main


@pytest.mark.parametrize(
    ("overrides", "expected"),
    MISTAKES,
    ids=[", ".join(overrides)[:90] for overrides, _ in MISTAKES],
)
def test_mistake(overrides, expected, files, main, capsys):
    text = refused(capsys, files, main, *overrides)
    for part in expected:
        assert part in text, text
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


def test_all_mistakes_are_in_one_message(files, main, capsys, monkeypatch):
    monkeypatch.setenv("RLINF_VL_CACHE", "/proc/cache")
    text = refused(
        capsys,
        files,
        main,
        "actor.optim.lr=-1",
        train_on("broken.jsonl"),
        "rollout.model.model_path=FILES/llama",
        "cluster.device=cuda",
        "runner.output_dir=/proc/runs",
    )
    assert text.startswith("error: 7 problems:\n")
    for part in (
        "actor.optim.lr: -1",
        "line 3",
        "'llama'",
        "FILES/llama lacks",
        "no CUDA device",
        "/proc/runs",
        "RLINF_VL_CACHE",
    ):
        assert part in text


def test_a_mistake_is_told_once(files, main, capsys):
    assert (
        refused(capsys, files, main, "data.image_keys=[pics]").count("column 'pics' not in toy")
        == 1
    )


def test_what_is_right_goes_on(files, main, capsys, tmp_path):
    overrides = [f"data.train_data_paths=[{files}/good.jsonl]", "data.val_data_paths=[]", NO_IMAGES]
    assert main(["train", "toy-grpo-cpu", "--check", *overrides]) == 0
    assert not any(tmp_path.iterdir()), "a check leaves nothing behind"
    assert main(["train", "toy-grpo-cpu", *overrides]) == 1
    ready, error, where = capsys.readouterr().err.strip().splitlines()
    assert ready.endswith(" ready")
    assert error == "error: AssertionError: not refused", "what follows the checks was reached"
    assert where == f"The whole of it is in {tmp_path}/results/toy-grpo-cpu/error.txt"
    assert "in goes_on" in (tmp_path / "results/toy-grpo-cpu/error.txt").read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's rights")
def test_what_may_not_be_read_is_named():
    folder = Path(tempfile.mkdtemp())
    (folder / "rows.jsonl").touch()
    folder.chmod(0o700)
    keys = [
        "data.train_data_paths=[%s/rows.jsonl]",
        "rollout.model.model_path=%s/m",
        "runner.output_dir=%s/runs",
    ]
    keys += ["runner.resume_dir=%s/checkpoint"]
    program = (
        "import os, sys; from rlinf_vl.config.load import parse_config, validate_config\n"
        "from rlinf_vl.preflight.inputs import RULES\n"
        "config = parse_config('toy-grpo-cpu', sys.argv[1:]); os.seteuid(65534)\n"
        "try: validate_config(config, RULES)\n"
        "except ValueError as error: print(error)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *(key % folder for key in keys)],
            env=os.environ | {"RLINF_VL_CACHE": f"{folder}/cache"},
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        shutil.rmtree(folder)
    said = done.stdout.splitlines()
    for key in keys:
        (line,) = [line for line in said if line.startswith(key.partition("=")[0])]
        assert "(Permission denied)" in line or ": Permission denied)" in line
    assert "RLINF_VL_CACHE" in done.stdout and not done.stderr


def test_a_check_does_not_ask_for_the_engine(main):
    assert main(["train", "--check", "toy-grpo-cpu", "rollout.rollout_backend=sglang"]) == 0


def test_a_check_imports_what_agents_will(main, tmp_path, monkeypatch, capsys):
    (tmp_path / "agent.py").write_text("async def solve(task, client): return 1.0\n")
    words = ["train", "--check", "toy-grpo-cpu", "rollout.agent.function=agent.py:solve"]
    assert main(words) == 0
    # installed, but without a package that it needs itself
    for module in [name for name in sys.modules if name.partition(".")[0] == "starlette"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "anyio", None)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "rollout.agent: starlette can't be imported (" in said and "anyio" in said
    assert "pip install 'rlinf_vl[agents]'" in said


def test_engines_that_could_not_be_placed(main, capsys, monkeypatch):
    monkeypatch.setattr(gpus, "gpu_memory", lambda: (80,) * 8)
    asked = [
        "train",
        "--check",
        "toy-grpo-cpu",
        "rollout.rollout_backend=sglang",
        "cluster.device=cuda",
    ]
    asked += ["rollout.tensor_parallel_size=2"]
    assert main([*asked, "cluster.component_placement={actor: 0-3, rollout: 4-7}"]) == 0
    assert main([*asked, "cluster.component_placement={actor: all, rollout: all}"]) == 0
    assert main([*asked, "cluster.component_placement={actor: 0-2, rollout: 0-2}"]) == 2
    assert "rollout.tensor_parallel_size: 2 does not divide the 3" in capsys.readouterr().err


def test_a_name_that_sglang_does_not_have(main, capsys, monkeypatch, tmp_path):
    fields = tmp_path / "site/sglang/srt/arg_groups/fields"
    fields.mkdir(parents=True)
    (tmp_path / "site/sglang/__init__.py").write_text("raise AssertionError('imported')")
    (fields / "memory.py").write_text(
        "class Memory:\n    page_size: int = 1\n    disable_radix_cache: bool = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    asked = ["train", "--check", "toy-grpo-cpu", "rollout.rollout_backend=sglang"]
    assert main([*asked, "rollout.sglang.server_args={disable_radix_cache: true}"]) == 0
    assert main([*asked, "rollout.sglang.server_args={disable_radix_cach: true}"]) == 2
    said = capsys.readouterr().err
    assert "rollout.sglang.server_args: SGLang has no argument 'disable_radix_cach'" in said
    assert "did you mean 'disable_radix_cache'" in said


def test_sglang_of_another_version_and_without_its_tools(
    files, main, capsys, monkeypatch, tmp_path
):
    overrides = [f"data.train_data_paths=[{files}/good.jsonl]", "data.val_data_paths=[]", NO_IMAGES]
    overrides += ["rollout.rollout_backend=sglang", "cluster.device=cuda"]
    monkeypatch.setattr(gpus, "gpu_memory", lambda: (80,))
    monkeypatch.setattr(sglang_machine, "version", lambda name: "0.5.22")
    text = refused(capsys, files, main, *overrides)
    assert (
        "sglang 0.5.22 is installed here, and 0.5.23 or newer is needed; run 'bash requirements/install.sh --sglang"
        in text
    )
    monkeypatch.setattr(sglang_machine, "version", lambda name: "0.5.23.post1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    text = refused(capsys, files, main, *overrides)
    assert (
        f"nvcc, with which SGLang compiles kernels on first use, is not at {tmp_path}/bin/nvcc"
        in text
    )


def test_placement_beyond_the_gpus_there_are(files, main, capsys, monkeypatch):
    monkeypatch.setattr(gpus, "gpu_memory", lambda: (80,) * 2)
    text = refused(
        capsys,
        files,
        main,
        "cluster.device=cuda",
        "cluster.component_placement={actor: 0-3, rollout: all}",
    )
    assert "'actor' wants slot 3, but the cluster has one node with slots 0-1" in text


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("GPU-a,GPU-b,GPU-c", 3),
        ("0,1,2,3,4,5", 4),
    ],
)
def test_gpus_are_counted_as_ray_does(monkeypatch, visible, count):
    """NVML's, within CUDA_VISIBLE_DEVICES; here with a stand-in for its library that shows four."""

    class Nvml:
        @staticmethod
        def nvmlInit_v2():
            return 0

        @staticmethod
        def nvmlDeviceGetCount_v2(reference):
            reference._obj.value = 4
            return 0

        @staticmethod
        def nvmlDeviceGetHandleByIndex_v2(index, handle):
            handle._obj.value = index + 1

        @staticmethod
        def nvmlDeviceGetMemoryInfo(handle, memory):
            memory._obj[0] = handle.value * 2**30

    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": Nvml}[name])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.gpu_memory() == tuple(i * 2**30 for i in range(1, count + 1))


@pytest.mark.parametrize("dashed", ["--runner.seed=3", "-x"])
def test_overrides_have_no_dashes(main, capsys, dashed):
    with pytest.raises(SystemExit) as end:
        main(["train", "toy-grpo-cpu", "--check", "runner.seed=1", dashed])
    assert (
        end.value.code == 2
        and f"{dashed}; overrides are written key=value, without dashes" in capsys.readouterr().err
    )


def test_what_a_verb_can_not_write_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").touch()
    assert command_line.main(["report", str(tmp_path), "--output", "/proc/report.html"]) == 1
    monkeypatch.setenv("RLINF_VL_CACHE", "/proc/cache")
    assert command_line.main(["toy"]) == 1
    report, toy = capsys.readouterr().err.strip().splitlines()
    assert report.startswith("error: ") and "/proc/report.html" in report
    assert toy.startswith("error: ") and "/proc/cache" in toy


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, which says at its end what it has imported of the slow things."""
    slow = "{'ray', 'torch', 'transformers', 'datasets'} & set(sys.modules)"
    program = f"import sys; from rlinf_vl.__main__ import main; code = main(sys.argv[1:]); print({slow} or ''); sys.exit(code)"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_neither_ray_nor_torch_is_imported_and_a_hub_out_of_reach_is_not_asked_again(tmp_path):
    # port 9 of this machine refuses
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = in_a_process(
        "train", "qwen3-vl-2b-grpo-fsdp-geo3k", f"runner.output_dir={tmp_path}", **hub
    )
    assert done.returncode == 2 and not done.stdout.strip(), done.stdout
    for key in (
        "rollout.model.model_path: Qwen/Qwen3-VL-2B-Instruct",
        "data.train_data_paths: hf://hiyouga/geometry3k:train",
    ):
        assert f"{key}: not in the cache here, and the hub can't be reached" in done.stderr
    assert (
        "hf download Qwen/Qwen3-VL-2B-Instruct'" in done.stderr
        and "--repo-type dataset" in done.stderr
    )
    assert "Traceback" not in done.stderr and "Retry" not in done.stderr


@pytest.mark.slow
def test_a_check_imports_no_large_package(files):
    """`examples/reasoning/run_main_grpo_vqa.sh` checks a config before SGLang is there; see tests/unit/scripts as well."""
    program = (
        "import sys; from rlinf_vl.__main__ import main; code = main(sys.argv[1:])\n"
        "files = {name.partition('.')[0]: getattr(module, '__file__', None) for name, module in sys.modules.items()}\n"
        "print(code, *sorted(name for name, file in files.items() if 'site-packages' in (file or '')))"
    )
    overrides = [
        f"data.train_data_paths=[{files}/other-names.parquet]",
        "rollout.model.model_path=owner/name",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--check", "toy-grpo-cpu", *overrides],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(files)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    code, *imported = done.stdout.split()
    assert code == "2" and {"hydra", "pyarrow", "huggingface_hub"} <= set(imported)
    assert not {"torch", "ray", "PIL", "transformers", "datasets", "sglang"} & set(imported)


@pytest.mark.slow
def test_what_is_in_the_cache_is_not_asked_for_at_a_hub_out_of_reach(tmp_path):
    """Without this, transformers takes two minutes to load a processor that is in the cache."""
    model = tmp_path / "hub/models--owner--name"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    (model / "snapshots/abc/config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "datasets/owner___data").mkdir(parents=True)
    program = "import os, sys; from rlinf_vl.__main__ import main; print(main(sys.argv[1:]), os.environ.get('HF_HUB_OFFLINE'))"
    overrides = ["rollout.model.model_path=owner/name", "data.train_data_paths=[hf://owner/data]"]
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--check", "toy-grpo-cpu", *overrides],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["2", "1"], done.stderr
    assert "error: hf://owner/data: can't be loaded from the hub" in done.stderr
    assert (
        "owner/name: the hub can't be reached" in done.stderr
        and "its copy in the cache is used" in done.stderr
    )


class Hub(BaseHTTPRequestHandler):
    """Has one model, of a family that is not supported."""

    def do_GET(self):
        there = self.path.startswith("/api/models/owner/llama")
        body = json.dumps(
            {"id": "owner/llama", "config": {"model_type": "llama"}} if there else {"error": "no"}
        ).encode()
        self.send_response(200 if there else 404)
        if not there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_what_the_hub_says_of_a_name(tmp_path):
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    try:
        known = in_a_process("train", "toy-grpo-cpu", "rollout.model.model_path=owner/llama", **hub)
        gone = in_a_process(
            "train",
            "toy-grpo-cpu",
            "rollout.model.model_path=owner/gone",
            "data.train_data_paths=[hf://owner/gone]",
            **hub,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert (
        known.returncode == 2 and "the checkpoint at owner/llama is of type 'llama'" in known.stderr
    )
    assert gone.returncode == 2 and "owner/gone: the hub has no model of that name" in gone.stderr
    assert "hf://owner/gone: the hub has no data set of that name" in gone.stderr


def test_what_is_written_down_here_agrees_with_where_it_comes_from(tmp_path):
    assert config_keys()["rollout.model.model_type"].allowed == ("auto", *FAMILIES)
    assert inputs.STATE_FILE == STATE_FILE
    for name, toy in TOYS.items():
        assert toy_of(name).model_type == toy.model_type
        for split, rows in toy.rows.items():
            assert peek(toy_dataset_path(split, name)) == (list(toy.columns), rows)


@pytest.mark.parametrize(
    ("text", "columns", "rows"),
    [
        ('{"a": 1}\n{"b": 2}\n\n', ["a", "b"], 2),
        ('\ufeff{"a": 1}\n', ["a"], 1),
        ('[{"a": 1},\n {"a": 2}]', ["a"], 2),
        ('{\n "a": [1],\n "b": [2]\n}', ["a", "b"], 1),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_peek_at_json_finds_what_datasets_finds(tmp_path, text, columns, rows, suffix):
    import datasets

    path = tmp_path / f"rows{suffix}"
    path.write_text(text, encoding="utf-8")
    assert peek(path) == (columns, rows)
    loaded = datasets.load_dataset(
        "json", data_files=[str(path)], split="train", cache_dir=str(tmp_path / "cache")
    )
    assert (loaded.column_names, len(loaded)) == (columns, rows)


def test_peek_at_a_saved_folder(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"problem": ["q"], "answer": ["1"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "parts"))
    assert (
        peek(tmp_path / "one").columns == peek(tmp_path / "parts").columns == ["problem", "answer"]
    )
