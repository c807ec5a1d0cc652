"""One step of supervised training on conversations of several turns with pictures, real FSDP2 over gloo: loss, gradient and new
weights are those of transformers' own forward with labels of -100, however the rows are packed and on how many ranks."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

LR = 0.05
N = 6


def without_pictures(messages, pictures: list):
    """Messages with `<image>` in their texts; the pictures go to the list, as PNG."""
    plain = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            texts = []
            for part in content:
                if "image" in part:
                    png = io.BytesIO()
                    Image.fromarray(part["image"]).save(png, "PNG")
                    pictures.append({"bytes": png.getvalue()})
                texts.append("<image>" if "image" in part else part["text"])
            content = "".join(texts)
        plain.append({"role": message["role"], "content": content})
    return plain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Random weights of the toy whose demonstrations have several turns, and its demonstrations."""
    from rlinf_vl.extras.toy.task import toy_of
    from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint

    folder = tmp_path_factory.mktemp("model")
    build_toy_checkpoint(folder / "model", progress=False, toy="toy-tool", steps=0)
    rng, rows = np.random.default_rng(3), []
    for _ in range(N):
        pictures: list = []
        (messages,) = toy_of("toy-tool").demonstrate(rng)
        plain = without_pictures(messages, pictures)
        rows.append({"messages": json.dumps(plain), "images": pictures})
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint):
    """(loss, gradient norm, new weights) by transformers, which pads; the labels are the toy's own."""
    from demonstration_batch import demonstration_batch
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    from rlinf_vl.extras.toy.task import toy_of

    folder = checkpoint / "model"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    batch = demonstration_batch(
        toy_of("toy-tool"),
        AutoTokenizer.from_pretrained(folder),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
        N,
        np.random.default_rng(3),
    )
    turns = (np.diff((batch["labels"] != -100).int().numpy(), axis=1) == 1).sum(1)
    assert turns.min() >= 2 and (batch["attention_mask"] == 0).any()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
    new = {n: (p - LR * gradients[n]).detach().numpy() for n, p in model.named_parameters()}
    return loss.item(), norm.item(), new


def step(checkpoint: Path, overrides: list[str]):
    """One rank's step: its part of the metrics and of the loss before the step, the new weights."""
    from rlinf_vl.actor.load import load_trainer
    from rlinf_vl.actor.mesh import Mesh
    from rlinf_vl.config.imitation import imitation_config
    from rlinf_vl.controller.batch import plan_of
    from rlinf_vl.extras.sft.demonstrations import Demonstrations
    from rlinf_vl.extras.sft.imitate import demonstrated
    from rlinf_vl.types import GroupSummary, Prices

    folder = str(checkpoint / "model")
    config = imitation_config(
        "toy-sft-cpu",
        [
            f"rollout.model.model_path={folder}",
            f"data.train_data_paths=[{checkpoint / 'rows.parquet'}]",
            "data.val_data_paths=[]",
            "data.sample_val=false",
            "runner.seq_length=256",
            "actor.optim.clip_grad=1e9",
            *overrides,
        ],
        (),
    )
    ranks = torch.distributed.get_world_size()
    mesh = Mesh.make("cpu", context=1, shard=ranks)
    trainer = load_trainer(config, folder, mesh, 1)
    trained = [p for p in trainer.policy.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.SGD(trained, lr=LR)
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
    demonstrations = Demonstrations(config, folder)
    groups = [demonstrations.group("train", row, f"g{row}") for row in range(N)]
    summaries = [GroupSummary.of(g, demonstrations.placeholder_ids) for g in groups]
    plan = plan_of(1, summaries, config, SimpleNamespace(data_size=ranks, prices=Prices()))
    ((mini),) = [by_rank[mesh.data_rank] for by_rank in plan.minibatches]
    mine = {item.group: groups[item.group] for items in mini.micro_batches for item in items}
    before = trainer.total_loss(mine, mini)
    sums, _ = trainer.update(mine, [mini], demonstrated(summaries))
    weights = {name: value.numpy() for name, value in trainer.weights(torch.float32)}
    return sums.state(), before, weights, len(mini.micro_batches)


LAYOUTS = {
    "packed": (1, ["runner.max_tokens_per_mbs=1024"]),
    "several rows": (1, ["runner.max_tokens_per_mbs=256"]),
    "padded": (
        1,
        ["runner.max_tokens_per_mbs=256", "actor.model.variable_seq_lengths=false"],
    ),
    "one by one, padded": (
        1,
        [
            "runner.enable_dynamic_batch_size=false",
            "actor.model.variable_seq_lengths=false",
            "runner.max_tokens_per_mbs=256",
        ],
    ),
    "2 ranks": (2, ["runner.max_tokens_per_mbs=256"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_transformers_however_it_is_laid_out(
    processes, checkpoint, reference, layout
):
    from rlinf_vl.observe.metrics import MetricSums

    ranks, overrides = LAYOUTS[layout]
    results = processes.run(ranks, step, checkpoint, overrides)
    metrics = MetricSums.merged(state for state, *_ in results).compute()
    loss, norm, expected = reference
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    # Before the step, without gradients: what a validation computes.
    total = sum(before[0] for _, before, *_ in results)
    n_tokens = sum(before[1] for _, before, *_ in results)
    assert total / n_tokens == pytest.approx(loss, rel=1e-5)
    assert results[0][3] == {"packed": 1, "one by one, padded": N}.get(layout, results[0][3])
    weights = results[0][2]
    assert set(weights) == set(expected)
    for name, value in weights.items():
        np.testing.assert_allclose(
            value, expected[name], atol=1e-5 * LR * max(1.0, norm), rtol=1e-6, err_msg=name
        )
