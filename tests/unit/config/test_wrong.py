"""Wrong configs, code and data sets, one after another as a stranger gives them: each refused by the command line before torch or
Ray are imported, without a traceback, on lines that name the thing, its value and the way out.

`python tests/unit/config/test_wrong.py` runs each in a process of its own, and prints how long it takes: on the wall, and of a CPU,
which other work on the machine does not stretch.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

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
ROW = {"problem": "1 + 1?", "answer": "2"}
ON_SIGHT = {"problem": "<image>What?", "answer": "2", "images": ["ok.png"]}


def rows(**cells) -> str:
    return "\n".join([json.dumps(ROW | cells)] * 40)


FILES = {
    "good.jsonl": rows(),
    "own.yaml": OWN,
    "own.yml": OWN,
    "base-typo.yaml": OWN.replace("toy-grpo-cpu", "toy-grpo-cp"),
    "tab.yaml": OWN.replace("  experiment_name", "\texperiment_name"),
    "key.yaml": OWN.replace("experiment_name", "experimnt_name"),
    "section.yaml": OWN + "trainer:\n  n_gpus: 2\n",
    "type.yaml": OWN + "algorithm:\n  group_size: eight\n",
    "twice.yaml": OWN + "data:\n  seed: 3\n",
    "picture.yaml": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "list.yaml": "- a\n",
    "empty.yaml": "",
    "circle.yaml": "defaults: [circle]\n",
    "refers.yaml": OWN + "actor:\n  optim: {lr: '${learning_rate}'}\n",
    "half.yaml": OWN + "actor:\n  optim: {lr: '${data.seed'}\n",
    "folder.yaml/x": "",
    "code.py": CODE,
    "syntax.py": "def score(response, answer:\n    return 1\n",
    "raises.py": "def score(response, answer): return 1.0\n1 / 0\n",
    "other-names.csv": "question,solution\n1 + 1?,2\n",
    "empty.csv": "",
    "heading.csv": "problem,answer\n",
    "ragged.csv": "problem,answer\n1 + 1?,2\n1,2,3,4\n",
    "latin.csv": b"problem,answer\n" + b"caf\xe9?,2\n" * 40,
    "numbers.jsonl": "1\n2\n",
    "broken.jsonl": f'{json.dumps(ROW)}\n{{"problem": \n',
    "bad.parquet": "PAR1",
    "sheet.xlsx": b"PK\x03\x04",
    "texts/a.txt": "1 + 1?",
    "torn.png": b"\x89PNG",
    "few.jsonl": json.dumps(ROW),
    "nowhere.jsonl": rows(**ON_SIGHT | {"images": ["images/1.png"]}),
    "torn.jsonl": rows(**ON_SIGHT | {"images": ["torn.png"]}),
    "counts.jsonl": rows(**ON_SIGHT | {"problem": "<image><image>What?"}),
    "unanswered.jsonl": rows(answer=None),
    "unasked.jsonl": rows(problem=""),
    "checkpoint/x": "",
}


def train_on(path: str, *overrides: str) -> list[str]:
    return ["own.yaml", f"data.train_data_paths={path}", *overrides]


def own(*overrides: str) -> list[str]:
    return ["own.yaml", *overrides]


ON_IMAGES = "data.image_keys=images"
#: What is asked for → what must be said of it.
CASES: list[tuple[list[str], list[str]]] = [
    (["ownn"], ["config 'ownn'", "did you mean 'own'"]),
    (["configs/own.yaml"], ["config 'configs/own.yaml': no such .yaml file"]),
    (["own.yml"], ["'own.yml'", "rename it to own.yaml"]),
    (["good.jsonl"], ["'good.jsonl': a config's file ends in .yaml"]),
    (["folder.yaml"], ["config 'folder.yaml': not in"]),
    (["base-typo.yaml"], ["defaults: no config 'toy-grpo-cp'", "did you mean 'toy-grpo-cpu'"]),
    (["tab.yaml"], ["tab.yaml, line 3, column 1", "indent with blanks"]),
    (["key.yaml"], ["runner.experimnt_name: unknown key", "'own'", "did you mean 'runner.experiment_name'"]),
    (["section.yaml"], ["trainer.n_gpus"]),
    (["type.yaml"], ["algorithm.group_size: 'eight' is not an integer"]),
    (["twice.yaml"], ["twice.yaml, line 8, column 1: found duplicate key data"]),
    (["picture.yaml"], ["picture.yaml: is not UTF-8", "write it as YAML"]),
    (["list.yaml"], ["list.yaml", "write keys with values, such as defaults: [toy-grpo-cpu]"]),
    (["empty.yaml"], ["runner.experiment_name: must be given", "data.train_data_paths: must be given"]),
    (["circle.yaml"], ["circle.yaml: defaults: they lead back to this file; take the circle out"]),
    (["refers.yaml"], ["actor.optim.lr: Interpolation key 'learning_rate' not found", "here it is actor.optim.lr"]),
    (["half.yaml"], ["half.yaml", "${data.seed"]),
    (own("runner.max_step=3"), ["runner.max_step: unknown key", "did you mean 'runner.max_steps'"]),
    (own("runner.max_steps", "3"), ["write runner.max_steps=3"]),
    (own("data.system_prompt=a, b"), ["write \"data.system_prompt='a, b'\""]),
    (own("data.max_prompt_length=536"), ["data.max_prompt_length=536", "lower it or raise seq_length"]),
    (own("runner.output_dir=/proc/x"), ["runner.output_dir: '/proc/x'", "name another folder"]),
    (own("runner.resume_dir=nowhere"), ["runner.resume_dir: no folder", "nowhere'", "auto or null"]),
    (own("cluster.component_placement={actor: 0}"), ["no place for 'rollout'; for example"]),
    (own("rollout.model.model_path=./checkpoint"), ["rollout.model.model_path", "no config.json", "name a checkpoint"]),
    (own("rollout.model.model_path=good.jsonl"), ["'good.jsonl' is a file; give a checkpoint's folder"]),
    (own("rollout.env_class=nowhere.py:Env"), ["rollout.env_class", "no file", "nowhere.py'", "give the path"]),
    (own("rollout.env_class=code.py:Evn"), ["no class 'Evn'", "did you mean 'Env'"]),
    (own("rollout.env_class=code.py:Env"), ["Env.start(self) can't be called as start(problem)"]),
    (own("rollout.env_class=code.py"), ["no environment 'code.py'", "path/to/file.py:Name"]),
    (own("rollout.agent.function=nowhere.py:solve"), ["rollout.agent.function", "no file", "nowhere.py'", "give the path"]),
    (own("rollout.agent.function=code.py:Env"), ["rollout.agent.function", "an agent is called as solve(task, client)"]),
    (own("rollout.agent.function=solve"), ["rollout.agent.function: 'solve' is no code", "path/to/file.py:function"]),
    (own("rollout.agent.function=syntax.py:score"), ["rollout.agent.function", "can't be imported"]),
    (own("rollout.agent.command=[no-such-command]"), ["rollout.agent.command: 'no-such-command' is no command"]),
    (own("rollout.agent.command=[python]", "rollout.env_class=maze"), ["rollout.env_class: 'maze' with rollout.agent"]),
    (
        own("rollout.agent.command=[python]", "rollout.agent.function=code.py:Env"),
        ["rollout.agent.command: rollout.agent.function is set, too; keep one"],
    ),
    (own("rollout.agent.max_calls=0"), ["rollout.agent.max_calls: 0 must be at least 1"]),
    (own("rollout.env_class=no_such_module:Env"), ["no_such_module can't be imported", "install it where workers run"]),
    (own("reward.reward_type=nowhere.py:score"), ["reward.reward_type", "no file", "give the path"]),
    (own("reward.reward_type=code.py:scor"), ["no function 'scor'", "did you mean 'score'"]),
    (own("reward.reward_type=code.py:nothing"), ["nothing() doesn't take these arguments", "(response, answer, **row)"]),
    (own("reward.reward_type=code.py:VALUE"), ["no function 'VALUE'", "its functions are score, nothing"]),
    (own("reward.reward_type=syntax.py:score"), ["syntax.py, line 1 can't be imported: SyntaxError"]),
    (own("reward.reward_type=raises.py:score"), ["raises.py can't be imported: ZeroDivisionError"]),
    (own("reward.functions=[{function: maths}]"), ["'maths'", "did you mean 'math'"]),
    (own("reward.functions=[{fn: math}]"), ["fn: unknown key; an entry has function, weight, kwargs"]),
    (own("algorithm.adv_type=code.py:nothing"), ["algorithm.adv_type", "an advantage is called as"]),
    (own("algorithm.loss_type=code.py:los"), ["algorithm.loss_type", "no function 'los'", "its functions are score, nothing"]),
    (own("rollout.model.model_type=code.py:FAMILY"), ["rollout.model.model_type", "no object 'FAMILY'"]),
    (own("runner.logger.logger_backends=code.py:nothing"), ["a tracker is called as open_tracker(run)"]),
    (train_on("nowhere.csv"), ["data.train_data_paths: no file", "nowhere.csv'"]),
    (train_on("other-names.csv"), ["data.prompt_key: column 'problem' not in", "columns are question, solution"]),
    (train_on("empty.csv"), ["empty.csv is empty; write at least one row"]),
    (train_on("heading.csv"), ["heading.csv is empty; write at least one row"]),
    (train_on("ragged.csv"), ["ragged.csv line 3 has 4 cells, the first line 2", "double quotes"]),
    (train_on("latin.csv"), ["latin.csv line 2 is not UTF-8", "save the file as UTF-8"]),
    (train_on("numbers.jsonl"), ["numbers.jsonl line 1 is 1, not an object of columns"]),
    (train_on("broken.jsonl"), ["broken.jsonl line 2 is not JSON", "repair or delete that line"]),
    (train_on("bad.parquet"), ["bad.parquet is no parquet file", "write it anew"]),
    (train_on("sheet.xlsx"), ["sheet.xlsx has suffix '.xlsx'", "convert it to one of them"]),
    (train_on("texts"), ["texts holds no file of rows", "name a folder with some"]),
    (train_on("few.jsonl"), ["data.rollout_batch_size: 16", "has 1 rows", "or add data"]),
    (train_on("good.jsonl", ON_IMAGES), ["data.image_keys: column 'images' not in", "data.image_keys=[] without images"]),
    (train_on("nowhere.jsonl", ON_IMAGES), ["40 of the first 40 rows can't be used", "'images/1.png'", "check-data"]),
    (train_on("torn.jsonl", ON_IMAGES), ["row 0: column 'images', image 0", "truncated header of an image"]),
    (train_on("counts.jsonl", ON_IMAGES), ["row 0: the prompt has 2 <image> and the row 1 images"]),
    (train_on("unanswered.jsonl"), ["row 0: column 'answer' is empty"]),
    (train_on("unasked.jsonl"), ["row 0: column 'problem' holds ''"]),
    (train_on("good.jsonl", "data.format=verll"), ["data.format: 'verll' is unknown", "did you mean 'verl'"]),
    (train_on("good.jsonl", "data.image_root=nowhere"), ["data.image_root: no folder", "nowhere'"]),
]  # fmt: skip
#: Runs each case in a fork of a process that has imported the command line, and writes [exit code, what it said, slow imports].
PROGRAM = """
import json, os, sys, traceback
from rlinf_vl.__main__ import main
sys.argv[0] = "rlinf-vl"
for words in json.load(sys.stdin):
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.dup2(writes, 1), os.dup2(writes, 2)
        try:
            code = main(["train", "--check", *words])
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 99
        slow = sorted({"ray", "torch", "transformers", "datasets"} & set(sys.modules))
        print("\\0" + " ".join(slow), flush=True), sys.stderr.flush()
        os._exit(code or 0)
    os.close(writes)
    said, _, slow = os.fdopen(reads).read().partition("\\0")
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said, slow.strip()]), flush=True)
"""


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    Image.new("RGB", (40, 40)).save(folder / "ok.png")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[list]:
    folder = tmp_path_factory.mktemp("wrong")
    write_files(folder)
    asked = json.dumps([words for words, _ in CASES])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=folder, input=asked, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(words) for words, _ in CASES])
def test_refused_before_anything_slow(told, case):
    code, said, slow = told[case]
    assert code == 2 and said.startswith("error: ") and "Traceback" not in said, said
    assert len(said.splitlines()) <= 4, said
    for text in CASES[case][1]:
        assert text in said
    assert not slow, f"imported {slow} before it was refused"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write_files(Path(made))
        seconds, cpu, used = [], [], 0.0
        for words, _ in CASES:
            start = time.monotonic()
            command = [sys.executable, "-m", "rlinf_vl", "train", "--check", *words]
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, env=os.environ)
            seconds.append(time.monotonic() - start)
            total = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            cpu, used = [*cpu, total - used], total
            print(
                f"{seconds[-1]:5.2f} s, CPU {cpu[-1]:4.2f} s  [{done.returncode}] {' '.join(words)}"
            )
        for what, found in (("wall", seconds), ("CPU", cpu)):
            median = sorted(found)[len(found) // 2]
            print(
                f"{len(found)} cases, {what}: the slowest {max(found):.2f} s, the median {median:.2f} s"
            )
