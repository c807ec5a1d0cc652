"""What is refused before a run begins, where the message depends on the machine or the hub, and what is not.

The messages are those of tests/golden/refusals.txt.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from refusals import FILES, machine, write_files

from rlinf_vl import __main__ as command_line
from rlinf_vl.config import config_keys
from rlinf_vl.config.toys import TOYS
from rlinf_vl.data.sources import peek
from rlinf_vl.driver import entry
from rlinf_vl.extras.toy.task import toy_dataset_path, toy_of
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.runtime import gpus
from rlinf_vl.runtime.checkpoints import STATE_FILE
from rlinf_vl.tools.check import inputs

launch_training = entry.launch_training
GOOD = ["data.train_data_paths=good.jsonl", "data.val_data_paths=[]", "data.image_keys=[]"]
SGLANG = ["rollout.rollout_backend=sglang", "cluster.device=cuda"]


@pytest.fixture
def main(monkeypatch, tmp_path) -> Iterator[Callable[[list[str]], int]]:
    """The command line in a folder with a data set, on a machine of eight GPUs without trackers and SGLang."""
    (tmp_path / "good.jsonl").write_text(FILES["good.jsonl"])
    monkeypatch.chdir(tmp_path)
    with machine(GPUS="8"), monkeypatch.context() as patched:
        # tests/unit/rollout/test_rehearsal.py
        patched.setattr(entry, "rehearse", lambda config: "ready")
        yield command_line.main


def test_what_is_right_goes_on(main, capsys, tmp_path, monkeypatch):
    def goes_on(config):
        raise AssertionError("not refused")

    assert main(["train", "toy-grpo-cpu", "--check", *GOOD]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["good.jsonl"]
    with monkeypatch.context() as patched:
        patched.setattr(entry, "launch_training", launch_training)
        patched.setattr(entry, "prepare_toys", goes_on)
        assert main(["train", "toy-grpo-cpu", *GOOD]) == 1
    ready, error, where = capsys.readouterr().err.strip().splitlines()
    assert ready.endswith(" ready")
    assert error == "error: AssertionError: not refused", "what follows the checks was reached"
    assert where == f"The whole of it is in {tmp_path}/results/toy-grpo-cpu/error.txt"
    assert "in goes_on" in (tmp_path / "results/toy-grpo-cpu/error.txt").read_text()


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.rollout_backend=sglang"],  # a check does not ask for the engine
        [*SGLANG, "rollout.tensor_parallel_size=2", "cluster.component_placement={actor: 0-3, rollout: 4-7}"],
        [*SGLANG, "rollout.tensor_parallel_size=2", "cluster.component_placement={actor: all, rollout: all}"],
        ["rollout.rollout_backend=sglang", "rollout.sglang.server_args={disable_radix_cache: true}"],
    ],
    ids=["backend", "apart", "shared", "argument"],
)  # fmt: skip
def test_what_sglang_can_do_goes_on(main, overrides, tmp_path, monkeypatch):
    for name, content in FILES.items():
        if name.startswith("sglang/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", "--check", "toy-grpo-cpu", *overrides]) == 0


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
        "from rlinf_vl.tools.check.inputs import RULES\n"
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
def test_a_check_imports_no_large_package(tmp_path):
    """`examples/reasoning/run_main_grpo_vqa.sh` checks a config before SGLang is there; see tests/unit/scripts as well."""
    program = (
        "import sys; from rlinf_vl.__main__ import main; code = main(sys.argv[1:])\n"
        "files = {name.partition('.')[0]: getattr(module, '__file__', None) for name, module in sys.modules.items()}\n"
        "print(code, *sorted(name for name, file in files.items() if 'site-packages' in (file or '')))"
    )
    write_files(tmp_path)
    overrides = [
        f"data.train_data_paths=[{tmp_path}/other-names.parquet]",
        "rollout.model.model_path=owner/name",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--check", "toy-grpo-cpu", *overrides],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
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
