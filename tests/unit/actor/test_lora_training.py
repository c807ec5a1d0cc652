"""Adapters from a real FSDP2 trainer, alone over gloo: what engines get, what checkpoints have, what an export is."""

import json

import numpy as np
import pytest
import torch
from adapters import in_4_bits
from peft import PeftModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.optimizer import parts_table
from rlinf_vl.config import load_config, save_config
from rlinf_vl.engines.make import make_engine
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.export.export import export_checkpoint
from rlinf_vl.models.families import family_of
from rlinf_vl.models.lora import is_adapter
from rlinf_vl.models.nf4 import is_quantized, shape_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, save_checkpoint
from rlinf_vl.runtime.run_folder import open_folder
from rlinf_vl.types import Request, SamplingParams

ALL = "actor.model.lora.target_modules=[all-linear]"
NF4 = "actor.model.lora.quantization=nf4"


def config_of(*overrides):
    fixed = ("actor.model.is_lora=true", "actor.fsdp_config.mixed_precision.param_dtype=fp32")
    return load_config("toy-grpo-cpu", (*fixed, "rollout.model.precision=fp32", *overrides))


def started(mesh, toy_folder, *overrides, step=None, folder=None):
    """A trainer of adapters, from the checkpoint of `step` in `folder` if one is named."""
    torch.manual_seed(1)
    trainer = load_trainer(config_of(*overrides), str(toy_folder), mesh, 10)
    if folder is not None:
        trainer.load(str(folder), step)
    return trainer


def train(trainer, steps):
    """Steps with gradients that depend on the weights only."""
    for _ in range(steps):
        for param in trainer.policy.parameters():
            if param.requires_grad:
                param.grad = 0.1 * param.detach().cos()
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.01
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.scheduler.step()


def weights(trainer):
    found = {name: param.detach() for name, param in trainer.policy.named_parameters()}
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).clone() for name, p in found.items()
    }


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run_of(mesh, toy_folder, folder, override):
    trainer = started(mesh, toy_folder, override)
    train(trainer, 3)
    save_config(
        config_of(override, f"rollout.model.model_path={toy_folder}"), folder / "config.yaml"
    )
    trainer.stage()
    save_checkpoint(folder, 3, trainer.write, {"step": 3}, keep_last=-1)
    return folder, trainer, override


@pytest.fixture(scope="module", params=["language", "all-linear"])
def trained(request, mesh, toy_folder, tmp_path_factory):
    """The folder of a run whose last step is 3, with a checkpoint of its adapters, and the trainer."""
    targets = f"actor.model.lora.target_modules=[{request.param}]"
    return run_of(mesh, toy_folder, tmp_path_factory.mktemp("run"), targets)


@pytest.fixture(scope="module")
def quantized(mesh, toy_folder, tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    return run_of(mesh, toy_folder, tmp_path_factory.mktemp("nf4"), NF4)


@pytest.mark.slow
def test_both_ways_of_sending_give_the_same_logprobs(trained, toy_folder):
    """From engines that were started on the base model and sent what a trainer sends."""
    _, trainer, targets = trained
    lora = trainer.actor.model.lora
    drawn, sent = {}, {}
    for sync in ("merged", "adapters"):
        overrides = targets, f"actor.model.lora.sync={sync}", "rollout.gpu_memory_utilization=0.1"
        config = config_of(*overrides)
        lora.sync = sync
        sent[sync] = dict(trainer.weights(torch.float32))
        shapes = {name: value.shape for name, value in trainer.weights(torch.float32, "meta")}
        assert shapes == {name: value.shape for name, value in sent[sync].items()}
        assert {is_adapter(name) for name in sent[sync]} == {sync == "adapters"}
        processor = Processor(toy_folder, family_of("auto", toy_folder))
        engine = make_engine(config, str(toy_folder), processor, "cpu")
        try:
            ids = processor.tokenizer("How many red squares are there?", return_tensors="np")[
                "input_ids"
            ][0]
            sampling = SamplingParams(max_new_tokens=24)
            asked = [
                Request(
                    ids.astype(np.int32), (), np.zeros((0, 3), np.int64), sampling, tuple(range(8))
                )
            ]
            before = engine.generate(asked)
            engine.load_weights([sent[sync]], 1)
            drawn[sync] = engine.generate(asked)[0].samples
        finally:
            engine.close()
        assert any(
            a.ids.tolist() != b.ids.tolist()
            for a, b in zip(before[0].samples, drawn[sync], strict=True)
        )
    lora.sync = "merged"
    for merged, adapters in zip(drawn["merged"], drawn["adapters"], strict=True):
        assert merged.ids.tolist() == adapters.ids.tolist()
        # The distorted weights make some positions sensitive: transformers' own float32 decoding differs from its
        # forward over the whole sequence by 2e-5 at one of them.
        np.testing.assert_allclose(merged.logprobs, adapters.logprobs, atol=1e-4, rtol=0)
        assert np.median(np.abs(merged.logprobs - adapters.logprobs)) < 2e-6
    touched = {name.partition(".lora_")[0] for name in sent["adapters"]}
    assert {name.removesuffix(".weight") for name in sent["merged"]} == touched, (
        "what adapters do not touch stays"
    )
    assert any("visual" in name for name in touched) == ("all-linear" in targets)


@pytest.mark.slow
def test_a_checkpoint_has_the_adapters_and_a_rank_goes_on_as_if_it_had_never_stopped(
    mesh, trained, toy_folder
):
    resumes(mesh, toy_folder, *trained)


@pytest.mark.slow
def test_a_quantized_run_resumes_too(mesh, quantized, toy_folder):
    resumes(mesh, toy_folder, *quantized)


def resumes(mesh, toy_folder, folder, trainer, targets):
    actor = folder / "checkpoints/global_step_3" / ACTOR_FOLDER
    size = sum(path.stat().st_size for path in actor.glob("*.distcp"))
    saved = FileSystemReader(actor).read_metadata().state_dict_metadata
    assert {name for name in saved if name.startswith("model.")} == {
        f"model.{name}" for name, _ in trainer.policy.named_parameters() if is_adapter(name)
    }
    adapters = sum(p.numel() for n, p in trainer.policy.named_parameters() if is_adapter(n))
    assert 12 * adapters < size < 1.3 * 12 * adapters + 200_000, (
        "float32 adapters with two moments, and nothing else"
    )
    at_save = weights(trainer)
    again = started(mesh, toy_folder, targets, step=3, folder=actor)
    assert equal(weights(again), at_save) and not again.frozen_differ
    train(again, 2)
    straight = started(mesh, toy_folder, targets)
    train(straight, 5)
    assert equal(weights(again), weights(straight))
    assert not equal(weights(again), at_save)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["actor.model.lora.rank=4", ALL, "actor.model.is_lora=false"])
def test_a_checkpoint_of_other_adapters_is_refused(mesh, toy_folder, tmp_path, other):
    trainer = started(mesh, toy_folder, "actor.model.lora.rank=8")
    trainer.stage()
    trainer.write(str(tmp_path))
    with pytest.raises(RunError, match="was written with other adapters"):
        started(mesh, toy_folder, "actor.model.lora.rank=8", other, step=1, folder=tmp_path)


@pytest.mark.slow
def test_the_config_of_other_adapters_is_refused_before_the_run(trained, tmp_path):
    folder, _, targets = trained
    checkpoint = folder / "checkpoints/global_step_3"
    for other, said in (
        ("actor.model.lora.rank=4", "lora.rank: 16 → 4"),
        ("actor.model.is_lora=false", "is_lora: true → false"),
        (NF4, "lora.quantization: 'none' → 'nf4'"),
    ):
        with pytest.raises(ConfigError, match=f"resume_dir: .*other adapters .*{said}"):
            open_folder(config_of(targets, other), tmp_path / "new", checkpoint, lambda *_: None)


def logprobs(model, ids):
    model.model.rope_deltas = None
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)


def exported(folder, toy_folder, tmp_path):
    """(the merged export, the model it began with), as transformers loads them; adapters are in tmp_path, too."""
    export_checkpoint(folder, tmp_path / "merged", "fp32")
    export_checkpoint(folder, tmp_path / "adapters", adapters=True)
    where = tmp_path / "merged", toy_folder
    merged, base = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32) for path in where
    )
    return merged, base


def assert_replays(trainer, merged):
    """A replay file gets all weights of the merged model; of a larger model than it may have, none."""
    replayed, expected = trainer.replay_weights(), dict(merged.named_parameters())
    assert replayed.keys() == expected.keys()
    assert all(np.array_equal(replayed[n], value.numpy()) for n, value in expected.items())
    assert trainer.replay_weights(max_bytes=4 * sum(v.numel() for v in expected.values())) == {}


@pytest.mark.slow
@torch.no_grad()
def test_an_export_is_merged_or_pefts(trained, toy_folder, tmp_path):
    """Loaded by transformers and by peft themselves: the logprobs of peft's own forward with the trainer's adapters."""
    folder, trainer, targets = trained
    merged, base = exported(folder, toy_folder, tmp_path)
    for name, value in trainer.weights(torch.float32):
        torch.testing.assert_close(merged.get_parameter(name), value, atol=0, rtol=0)
    assert_replays(trainer, merged)
    said = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(toy_folder) and said["r"] == 16
    ids = torch.arange(20, 60)[None]
    without = logprobs(base, ids)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert {p.dtype for n, p in loaded.named_parameters() if is_adapter(n)} == {torch.float32}
    torch.testing.assert_close(
        logprobs(loaded.model, ids), logprobs(merged, ids), atol=1e-5, rtol=0
    )
    assert (logprobs(merged, ids) - without).abs().max() > 0.1
    with pytest.raises(ConfigError, match="--adapters: the run of .* trained none"):
        save_config(load_config("toy-grpo-cpu"), tmp_path / "config.yaml")
        save_checkpoint(tmp_path, 1, lambda _: {}, {"step": 1}, keep_last=-1)
        export_checkpoint(tmp_path, tmp_path / "none", adapters=True)


def test_the_table_names_adapters(mesh, trained):
    _, trainer, targets = trained
    rows = [
        line.split("  ") for line in parts_table(trainer.policy, mesh, trainer.actor).splitlines()
    ]
    names = [row[0].strip() for row in rows]
    parts = ["language_model", "projector", "vision_tower"]
    adapted = parts if "all-linear" in targets else parts[:1]
    assert names == [
        "part",
        *(n for p in parts for n in ([p, f"{p} adapters"] if p in adapted else [p])),
    ]
    for row in rows[1:]:
        assert (row[-1].strip() == "frozen") == ("adapters" not in row[0])
    assert (trainer.batches.cache is None) == trainer.trains_vision == ("all-linear" in targets)


@pytest.mark.slow
@torch.no_grad()
def test_a_quantized_runs_export_is_its_dequantized_base_and_its_adapters(
    quantized, toy_folder, tmp_path
):
    folder, trainer, _ = quantized
    merged, base = exported(folder, toy_folder, tmp_path)
    ids = torch.arange(20, 60)[None]
    sent = dict(trainer.weights(torch.float32))
    packed = {
        name.replace(".base_layer", "")
        for name, p in trainer.policy.model.named_parameters()
        if is_quantized(p)
    }
    assert sent.keys() == packed
    assert {n: v.shape for n, v in trainer.weights(torch.float32, "meta")} == {
        n: v.shape for n, v in sent.items()
    }
    for name, value in sent.items():
        torch.testing.assert_close(merged.get_parameter(name), value, atol=0, rtol=0)
    assert_replays(trainer, merged)
    before = logprobs(base, ids)
    loaded = PeftModel.from_pretrained(
        in_4_bits(base, ["model.visual", "lm_head"]), tmp_path / "adapters"
    )
    torch.testing.assert_close(
        logprobs(loaded.model, ids), logprobs(merged, ids), atol=1e-5, rtol=0
    )
    assert (logprobs(merged, ids) - before).abs().max() > 0.1


def test_quantized_weights_are_whole_said_so_and_moved_with_the_others(mesh, quantized):
    _, trainer, _ = quantized
    lines = parts_table(trainer.policy, mesh, trainer.actor).splitlines()
    (row,) = (line for line in lines if "in nf4" in line)
    packed = [p for p in trainer.policy.parameters() if is_quantized(p)]
    total = sum(shape_of(p).numel() for p in packed)
    assert f"{total:,}" in row and "nf4, fp32" in row and row.rstrip().endswith("frozen")
    assert total == 2 * sum(p.nbytes for p in packed) and not any(
        isinstance(p, DTensor) for p in packed
    )
    before = {name: value.clone() for name, value in trainer.weights(torch.float32)}
    trainer.memory.release(["weights"])
    trainer.memory.restore()
    assert equal(before, dict(trainer.weights(torch.float32)))
