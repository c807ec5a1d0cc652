"""Exports with their model cards, in a folder and on a hub that speaks its protocol on this machine."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hub_server import TOKEN, running_hub
from PIL import Image
from transformers import AutoModelForImageTextToText

import rlinf_vl
from rlinf_vl.config import load_config, save_config
from rlinf_vl.data.digest import digest, write_digests
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.export.publish import publish
from rlinf_vl.extras.toy.task import toy_dataset_path
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model
from rlinf_vl.models.lora import add_adapters, is_adapter
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, save_checkpoint


def run_of(folder, base, *overrides):
    """The folder of a run as it is after two of three steps, of which two are in its checkpoint: a base with weights that moved."""
    config = load_config(
        "toy-grpo-cpu", [f"rollout.model.model_path={base}", "runner.max_steps=3", *overrides]
    )
    config.runner.code_files = {"/home/me/own.py": "TOP_SECRET = 1"}
    config.rollout.env_kwargs = {"api_key": "sk-1234"}
    config.rollout.env_kwargs["command"] = "see --at=/home/me/tool.py 'a' /home/me/x/y </a/b>"
    family = family_of("auto", base)
    model = load_model(base, family, torch.float32)
    if config.actor.model.is_lora:
        add_adapters(model, family, config.actor.model.lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) or not config.actor.model.is_lora:
                parameter += 0.01
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    save_config(config, folder / "config.yaml")
    save_checkpoint(
        folder,
        2,
        lambda to: {} if dcp.save({"model": state}, checkpoint_id=to, no_dist=True) else {},
        {"step": 2},
        keep_last=-1,
    )
    assert (folder / "checkpoints/global_step_2" / ACTOR_FOLDER / ".metadata").is_file()
    rows = [{"step": k, "reward/mean": k / 10, "val/accuracy": k / 8} for k in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(
        '{"python": "3.11", "packages": {"torch": "2.13"}, "gpus": []}'
    )
    write_digests(
        folder, {split: {"toy": toy_dataset_path(split, "toy")} for split in ("train", "val")}
    )
    return {name: p.detach() for name, p in model.named_parameters()}


def export(*arguments, expect=0, **environment):
    command = [sys.executable, "-m", "rlinf_vl", "export", *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == expect, done.stderr
    return done.stderr


def at_this_hub(monkeypatch, hub):
    """For this process, which has read its environment before; the hub and its protocol are as in another one."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def run(tmp_path_factory, toy_folder):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_of(folder, toy_folder)


@pytest.mark.slow
def test_what_is_pushed_is_what_transformers_loads_from_there(run, hub, tmp_path):
    folder, weights = run
    said = export(
        folder,
        "--push",
        "me/model",
        "--private",
        "--dtype",
        "fp32",
        **hub.environment,
        HF_HOME=str(tmp_path),
    )
    assert f"wrote {hub.url}/me/model" in said and hub.created[-1]["visibility"] == "private"
    files = hub.repositories["me/model"]
    assert {
        "README.md",
        "curve.png",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= files.keys()
    there = huggingface_hub.snapshot_download(
        "me/model", endpoint=hub.url, cache_dir=tmp_path, token=TOKEN
    )
    loaded = AutoModelForImageTextToText.from_pretrained(there, dtype=torch.float32)
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value.detach(), weights[name], rtol=0, atol=0)


def test_the_card_has_curve_config_and_data(run, tmp_path):
    folder, _ = run
    assert publish(folder, tmp_path / "out") == str(tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["library_name"] == "transformers" and head["pipeline_tag"] == "image-text-to-text"
    assert "base_model" not in head, "a folder of this machine is no model of the hub"
    (metric,) = head["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == 0.25, "the checkpoint is of step 2; the run went on"
    for split in ("train", "val"):
        data = toy_dataset_path(split, "toy").read_bytes()
        assert f"| {split} | `toy` | {len(data)} | `{hashlib.sha256(data).hexdigest()}` |" in text
    config = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert config["runner"]["max_steps"] == 3 and config["rollout"]["env_kwargs"] == {
        "api_key": "left out here",
        "command": "see --at=tool.py 'a' y </a/b>",
    }
    assert "/home/me" not in text and str(folder.parent) not in text
    assert "TOP_SECRET" not in text and "sk-1234" not in text and "own.py" in text
    with Image.open(tmp_path / "out/curve.png") as curve:
        assert curve.size == (720, 400)
        colors = {color for _, color in curve.convert("RGB").getcolors(10**6)}
    assert {(0x2F, 0x81, 0xC7), (0xD9, 0x77, 0x2B)} <= colors


@pytest.mark.slow
def test_adapters_are_a_folder_of_peft(tmp_path, toy_folder, hub, monkeypatch):
    from peft import PeftModel

    lora = ["actor.model.is_lora=true", "actor.model.lora.target_modules=[all-linear]"]
    weights = run_of(tmp_path / "run", toy_folder, *lora)
    at_this_hub(monkeypatch, hub)
    assert (
        publish(tmp_path / "run", tmp_path / "out", adapters=True, push="adapters")
        == f"{hub.url}/me/adapters"
    )
    files = hub.repositories["me/adapters"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
    assert yaml.safe_load(files["README.md"].decode().split("---")[1])["library_name"] == "peft"
    base = AutoModelForImageTextToText.from_pretrained(toy_folder, dtype=torch.float32)
    loaded = dict(PeftModel.from_pretrained(base, tmp_path / "out").named_parameters())
    for name, value in weights.items():
        if is_adapter(name):
            torch.testing.assert_close(loaded[f"base_model.model.{name}"], value, rtol=0, atol=0)
    image = Image.new("RGB", (64, 64), "red")
    asked = [
        {
            "role": "user",
            "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}],
        }
    ]
    answers = set()
    for source in (tmp_path / "run", tmp_path / "out"):
        policy = rlinf_vl.load_policy(source, device="cpu")
        answers.add(policy.generate(asked, max_new_tokens=8))
        policy.close()
    assert len(answers) == 1


@pytest.mark.slow
def test_what_is_refused_is_refused_before_the_model_is_loaded(run, hub, tmp_path, monkeypatch):
    folder, _ = run
    assert "nowhere to write to" in export(folder, expect=2)

    def refused(kind, name):
        with pytest.raises(kind) as error:
            publish(folder, None, push=name)
        return str(error.value)

    assert "write owner/name" in refused(ConfigError, "a/b/c")
    at_this_hub(monkeypatch, hub)
    said = refused(ConfigError, "others/model")
    assert "the hub refuses" in said and "HF_TOKEN" in said and TOKEN not in said
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    assert "log in with 'hf auth login'" in refused(ConfigError, "me/other")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the hub can't be reached" in refused(RunError, "me/other")
    assert "me/other" not in hub.repositories


def test_a_torn_run_is_exported_all_the_same(run, tmp_path):
    folder, _ = run
    torn = tmp_path / "torn"
    shutil.copytree(folder, torn, ignore=shutil.ignore_patterns("*.jsonl", "*.json"))
    shutil.copy(
        folder / "checkpoints/global_step_2/controller.json", torn / "checkpoints/global_step_2"
    )
    publish(torn, tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert "`unknown`" in text and "curve" not in text and "model-index" not in text


def test_digests_are_those_of_sha256sum(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.bin").write_bytes(b"x" * 1000)
    (tmp_path / "a/b.txt").write_bytes(base64.b64encode(b"y"))
    command = "sha256sum b.txt x.bin | tee /dev/stderr | sha256sum"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path / "a", capture_output=True, text=True, check=True
    )
    assert digest(tmp_path / "a") == {"sha256": done.stdout.split()[0], "bytes": 1004}
    assert digest(tmp_path / "a/x.bin")["sha256"] == done.stderr.splitlines()[1].split()[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_lora", [False, True])
def test_the_snippet_of_the_card_generates(tmp_path, toy_folder, is_lora, monkeypatch, capsys):
    run_of(tmp_path / "run", str(toy_folder), f"actor.model.is_lora={str(is_lora).lower()}")
    output = tmp_path / "out"
    publish(tmp_path / "run", output, dtype="fp32", adapters=is_lora)
    text = (output / "README.md").read_text()
    assert str(toy_folder) not in text
    snippet, with_picture = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("picture.png")
    folders = {"<this repository or folder>": str(output)}
    folders[f"path/to/{toy_folder.name}"] = str(toy_folder)
    made = {}
    for code in (snippet, with_picture):
        for name, folder in folders.items():
            code = code.replace(name, folder)
        exec(code, made)  # noqa: S102
    assert made["output"].shape[1] > made["inputs"]["input_ids"].shape[1], "tokens were generated"
    assert isinstance(made["answer"], str)
    made["policy"].close()
