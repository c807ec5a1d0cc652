"""`doctor CONFIG --smoke` on real parts: sound ones pass, and each planted fault is named with its stage and cause."""

import dataclasses
import errno
import json
import os

import numpy as np
import psutil
import pytest
import torch

from rlinf_vl.__main__ import main
from rlinf_vl.actor.checkpoint import CheckpointWriter
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.processing import PixelCache

pytestmark = pytest.mark.integration
LOCAL = "cluster.backend=local"


@pytest.fixture
def smoke(tmp_path, capsys):
    """Runs the verb, and returns its exit code, its stages by name and its last line."""

    def run(config: str, *overrides: str, options: tuple[str, ...] = ()):
        out, report = tmp_path / "out", tmp_path / "smoke.json"
        arguments = ["doctor", config, f"runner.output_dir={out}", *overrides]
        offline = os.environ.get("HF_HUB_OFFLINE")
        code = main([*arguments, "--smoke", "--json", str(report), *options])
        assert os.environ.get("HF_HUB_OFFLINE") == offline, "whoever calls may need the hub"
        content = json.loads(report.read_text())
        # Nothing is left behind, not even the folder of runs that was not there before.
        assert not out.exists()
        line = capsys.readouterr().out.strip().splitlines()[-1]
        assert line == content["verdict"] and content["passed"] == (code == 0)
        return code, {stage["name"]: stage for stage in content["stages"]}, line

    return run


def test_sound_parts_pass_every_stage(smoke):
    code, stages, line = smoke("toy-grpo-cpu", LOCAL)
    assert code == 0, stages
    assert list(stages) == [
        "weights", "engines", "ranks", "generate", "sleep", "logprobs", "train", "sync", "follow", "save", "load",
    ]  # fmt: skip
    assert line.startswith("smoke: ok, all 11 stages in ")
    assert all(stage["seconds"] > 0 and stage["gib"] > 0 for stage in stages.values())
    assert "8 prompts with 9 images" in stages["generate"]["text"]


class BlankPixels(PixelCache):
    def __call__(self, image):
        return np.zeros_like(super().__call__(image))


def plant_blind_engine(monkeypatch):
    monkeypatch.setattr("rlinf_vl.engines.make.PixelCache", BlankPixels)


def plant_blindness_everywhere(monkeypatch):
    plant_blind_engine(monkeypatch)
    monkeypatch.setattr("rlinf_vl.actor.batches.PixelCache", BlankPixels)


def plant_stale_weights(monkeypatch):
    def keep(engine, buckets, version):
        # What a copy into the wrong memory does: all that was sent is received, and not used.
        for _ in buckets:
            pass
        engine.version = version

    monkeypatch.setattr(TorchEngine, "load_weights", keep)
    monkeypatch.setattr(TorchEngine, "fingerprint", lambda engine, names: None)


def plant_forgotten_temperature(monkeypatch):
    submit = TorchEngine.submit

    def at_one(engine, requests):
        plain = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.0))
            for r in requests
        ]
        return submit(engine, plain)

    monkeypatch.setattr(TorchEngine, "submit", at_one)


def plant_full_disk(monkeypatch):
    def refuse(writer, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointWriter, "write", refuse)


def plant_lost_optimizer(monkeypatch):
    from rlinf_vl.actor import checkpoint

    load = checkpoint.load

    def without_moments(folder, rank, policy, optimizer):
        load(folder, rank, policy, optimizer)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    monkeypatch.setattr(checkpoint, "load", without_moments)


@pytest.mark.sample("blind")
@pytest.mark.parametrize(
    "plant, stage, cause, overrides",
    [
        pytest.param(plant_blind_engine, "logprobs", "the engine is blind", (), id="blind"),
        pytest.param(
            plant_blindness_everywhere,
            "logprobs",
            "nothing shows that either sees",
            (),
            id="unseen",
        ),
        pytest.param(plant_stale_weights, "follow", "weights are stale", (), id="stale"),
        pytest.param(
            plant_forgotten_temperature,
            "logprobs",
            "are those of temperature 1, and algorithm.sampling_params.temperature is 0.6",
            ("algorithm.sampling_params.temperature=0.6",),
            id="temperature",
        ),
        pytest.param(plant_full_disk, "save", "No space left on device", (), id="disk"),
        pytest.param(plant_lost_optimizer, "load", "are not those that were saved", (), id="load"),
    ],
)
def test_a_fault_is_named_with_its_stage(smoke, monkeypatch, plant, stage, cause, overrides):
    plant(monkeypatch)
    code, stages, line = smoke("toy-grpo-cpu", LOCAL, *overrides)
    assert code == 1
    assert line.startswith(f"smoke: FAILED in {stage}: ") and cause in line
    assert stages[stage]["state"] == "failed"
    # Stages that do not need the one that failed have run.
    for name in {"train", "save"} - {stage}:
        assert stages[name]["state"] == "ok"


def test_what_the_time_did_not_reach_is_said(smoke):
    code, stages, line = smoke("toy-grpo-cpu", LOCAL, options=("--limit", "0.05"))
    assert code == 1 and stages["weights"]["state"] == "unreached"
    assert "NOT FINISHED within 0.05 s: weights, engines" in line and "--limit" in line


@pytest.mark.parametrize("member", ["lora", "moe"])
def test_other_members_pass(smoke, member):
    code, _, line = smoke(f"toy-grpo-cpu-{member}", LOCAL)
    assert code == 0, line


def test_two_ranks_and_two_engines_on_ray(smoke):
    """The very parts of a run with Ray; nothing of them stays."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    shared = set(os.listdir("/dev/shm"))
    code, stages, line = smoke(
        "toy-grpo-cpu",
        "cluster.component_placement={actor: 0-1, rollout: 0-1}",
        options=("--limit", "600"),
    )
    assert code == 0, line
    assert "engines 2, actor ranks 2, shared slots" in stages["engines"]["text"]
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before
    mine = [name for name in set(os.listdir("/dev/shm")) - shared if "rlinf" in name]
    assert not mine


def test_the_checkpoint_has_the_true_shape_and_every_id_a_token(tmp_path):
    """A model of the hub, in a folder with its config.json alone: shape, names and stand-ins."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from rlinf_vl.config import load_config
    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.processing import Processor
    from rlinf_vl.tools.check.smoke.checkpoint import write_checkpoint

    given = tmp_path / "given"
    given.mkdir()
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }  # fmt: skip
    shape = {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }
    (given / "config.json").write_text(json.dumps(shape))
    config = load_config(
        "toy-grpo-cpu", [f"rollout.model.model_path={given}", "rollout.model.precision=bf16"]
    )
    written = write_checkpoint(config, tmp_path / "random")
    assert written.stands_in and written.token_side == 32
    model, info = AutoModelForImageTextToText.from_pretrained(
        written.folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == written.parameters
    assert model.dtype == torch.bfloat16 and model.lm_head.weight.shape == (2048, 64)
    # Each matrix keeps the size of what it multiplies; norms are ones.
    down = model.model.language_model.layers[1].mlp.down_proj.weight.detach().float()
    assert float(down.std()) == pytest.approx(96**-0.5, rel=0.05)
    assert torch.equal(model.model.language_model.norm.weight.float(), torch.ones(64))
    tokenizer = AutoTokenizer.from_pretrained(written.folder)
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))
    banned = Processor(written.folder, family_of("qwen3_vl")).banned_ids(2048)
    assert 0 < banned.sum() < 10
