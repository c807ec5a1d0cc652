"""The benchmarks run as their pages say, and write flat figures that make sense; speeds are not judged here."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def figures_of(tmp_path: Path, script: str, *arguments: str) -> dict:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--json", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())
    assert all(
        value is None or isinstance(value, int | float | str | bool) for value in figures.values()
    )
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))
    return figures


@pytest.mark.nightly
@pytest.mark.parametrize("tower", [[], ["--train-tower"]])
def test_trainer(tmp_path, tower):
    """The three ways must agree on the loss, or the benchmark fails."""
    drawn = ["--data", str(tmp_path / "nothing.parquet")]
    sizes = [
        "--shape",
        "tiny",
        "--groups",
        "3",
        "--samples",
        "4",
        "--budget",
        "1500",
        "--repeats",
        "1",
    ]
    figures = figures_of(tmp_path, "trainer.py", *sizes, *drawn, *tower)
    assert figures["rows"] == "drawn"
    assert {"ratio_shared_vs_padded", "ratio_shared_vs_packed"} <= figures.keys()
    assert figures["floor_seconds"] == pytest.approx(
        sum(
            v
            for k, v in figures.items()
            if k.startswith("floor_") and k.endswith("_seconds") and k != "floor_seconds"
        )
    )
    assert 0 < figures["packing_fill"] <= 1 and 0 <= figures["rank_imbalance"] < 1
    assert 0 < figures["floor_fraction"] < 1


def test_sft(tmp_path):
    figures = figures_of(tmp_path, "sft.py", "--shape", "tiny", "--batch", "4", "--steps", "1")
    assert 0 < figures["loss_tokens"] < figures["tokens"]
    # Random weights guess among 512 tokens.
    assert figures["loss"] == pytest.approx(math.log(512), rel=0.05)
    per_second = figures["tokens"] / figures["step_cpu_seconds"]
    assert figures["tokens_per_cpu_second"] == pytest.approx(per_second)


def test_algorithms(tmp_path):
    """The table and curve of runs that are there, two seeds of one and one that spends its budget early."""
    for name, groups in (("grpo-1", 16), ("grpo-2", 16), ("dapo-1", 32), ("dapo-2", 32)):
        rows = []
        for step in range(21):
            accuracy = {"val/accuracy": step / 20} if step % 10 == 0 else {}
            trained = {
                "rollout/generated_groups": groups,
                "actor/entropy": 0.1,
                "rollout/response_length_mean": 9,
            }
            rows.append({"step": step, "time/step": 2.0, **accuracy, **(trained if step else {})})
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    options = ["grpo", "dapo", "--seeds", "1", "2", "--steps", "20", "--folder", str(tmp_path)]
    figures = figures_of(tmp_path, "algorithms.py", *options)
    assert figures["grpo, seed 2: best"] == 1.0 and figures["dapo, seed 2: best"] == 0.5
    assert figures["grpo, seed 1: answers_to_half"] == 10 * 128
    svg = (tmp_path / "curves.svg").read_text()
    assert svg.count("<polyline") == 2 and "dapo" in svg


def test_planner(tmp_path):
    figures = figures_of(tmp_path, "planner.py", "--largest", "10000")
    assert figures["fill_10000"] > 0.9 and figures["imbalance_10000"] < 0.03


@pytest.mark.nightly
def test_lora(tmp_path):
    figures = figures_of(tmp_path, "lora.py", "--shape", "tiny", "--rank", "2")
    for figure in ("trained", "weights_bytes", "optimizer_bytes", "checkpoint_bytes", "sync_bytes"):
        assert figures[f"LoRA, language: {figure}"] < figures[f"full: {figure}"]
    assert figures["LoRA, language: optimizer_bytes"] == 8 * figures["LoRA, language: trained"]
    assert (
        figures["LoRA, language, as adapters: sync_bytes"] == 4 * figures["LoRA, language: trained"]
    )


@pytest.mark.nightly
def test_context_parallel(tmp_path):
    """Losses must agree, or the benchmark fails. What activations take is counted, not timed."""
    figures = figures_of(
        tmp_path, "context_parallel.py", "--shape", "tiny", "--tokens", "2048", "--repeats", "1"
    )
    assert figures["kept_ratio_2"] < 0.6 and figures["peak_ratio_2"] < 0.6
    assert figures["kept_ratio_4"] < 0.35 and figures["peak_ratio_4"] < 0.35


@pytest.mark.nightly
def test_exchange(tmp_path):
    figures = figures_of(tmp_path, "exchange.py", "--groups", "8", "--repeats", "1")
    assert 1 <= figures["object_store_over_unique"] < 1.1


@pytest.mark.nightly
def test_weight_sync(tmp_path):
    figures = figures_of(
        tmp_path, "weight_sync.py", "--megabytes", "32", "--repeats", "1", "--workers", "1"
    )
    assert figures["object_store_seconds"] > 0


@pytest.mark.nightly
def test_delta_sync(tmp_path):
    """Weights must be equal after all syncs, or the benchmark fails."""
    figures = figures_of(
        tmp_path,
        "delta_sync.py",
        "--shape",
        "tiny",
        "--steps",
        "3",
        "--lr",
        "1e-6",
        "--toy-steps",
        "0",
    )
    assert figures["tiny_1e-06: share_mean"] < 0.2


@pytest.mark.nightly
def test_weights_in_flight(tmp_path):
    sizes = [
        "--groups",
        "2",
        "--samples",
        "4",
        "--new-tokens",
        "200",
        "--every",
        "0.05",
        "--repeats",
        "1",
        "--check",
        "2",
    ]
    figures = figures_of(tmp_path, "weights_in_flight.py", *sizes)
    assert figures["recompute_updates"] and figures["keep_updates"]
    assert figures["recompute_largest_difference"] < 1e-4


def test_scale(tmp_path):
    """CPU seconds, with room for noise: their growth must not be that of a square (16), or the benchmark fails as well."""
    sizes = ["--groups", "500", "2000", "--ranks", "64", "--steps", "3", "--late", "500", "2000"]
    engines = ["--evaluated", "1000", "4000", "--engines", "5", "20", "--workers"]
    figures = figures_of(tmp_path, "scale.py", *sizes, *engines)
    assert figures["growth_to_2000_ranks_64"] < 12
    assert figures["groups_2000_ranks_64_bytes_per_rank"] < 2000 * 8 * 40 / 8, (
        "a rank is sent its own part only"
    )
    assert {
        "growth_to_2000_late",
        "growth_to_4000_evaluated",
        "growth_to_20_engines",
    } <= figures.keys()
    assert figures["evaluated_4000_messages"] <= 20, (
        "an engine is told once which of its groups nobody needs"
    )
    assert figures["engines_20_messages"] == 2000, (
        "only the engine that has a group is told that nobody needs it"
    )


def test_multi_turn(tmp_path):
    """Keeping prefixes must change nothing that is sampled."""
    sizes = [
        "--groups",
        "2",
        "--samples",
        "3",
        "--new-tokens",
        "4",
        "--image",
        "48",
        "--repeats",
        "1",
    ]
    figures = figures_of(tmp_path, "multi_turn.py", *sizes)
    assert (
        figures["ids_identical"]
        and figures["prefill_ratio_kept"] <= 1.1 < 2 < figures["prefill_ratio_whole"]
    )


@pytest.mark.nightly
def test_environments(tmp_path):
    figures = figures_of(
        tmp_path, "environments.py", "--groups", "8", "--samples", "5", "--turn-timeout", "4"
    )
    assert figures["episodes"] == 40 and figures["harmed"] == 0 and figures["ended_well"] == 34
    assert {figures[f"errors_{fault}"] for fault in ("crash", "hang", "picture")} == {2}
    assert 0 < figures["engine_busy"] <= 1 and figures["seconds"] < 60


@pytest.mark.nightly
def test_agents(tmp_path):
    sizes = ["--steps", "1", "--groups", "2", "--samples", "2", "--calls", "40", "--clients", "4"]
    sizes += ["--supervised", "1"]
    figures = figures_of(tmp_path, "agents.py", *sizes)
    assert figures["seconds_environment"] > 0 and figures["ratio_agent"] > 0
    assert figures["ratio_env_processes"] > 0 and figures["calls_per_second"] > 0


@pytest.mark.nightly
def test_delta_net(tmp_path):
    """Outputs and gradients must be transformers', or the benchmark fails."""
    figures = figures_of(tmp_path, "delta_net.py", "--layers", "toy", "--repeats", "1")
    assert figures["ratio_batch_toy"] > 0


@pytest.mark.nightly
def test_routing_replay(tmp_path):
    """In float32 both sides choose alike; in bfloat16 they do not, and replay brings their logprobs nearer."""
    from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint

    build_toy_checkpoint(
        model := tmp_path / "model", progress=False, toy="toy-qwen3_vl_moe", steps=1
    )
    asked = ["--model", str(model), "--seeds", "1", "--problems", "8", "--samples", "4"]
    same = figures_of(tmp_path, "routing_replay.py", *asked, "--precision", "fp32")
    assert (
        same["off_1_disagreement"] == same["replay_1_disagreement"] == 0
        and same["off_1_abs_diff_max"] < 1e-5
    )
    figures = figures_of(tmp_path, "routing_replay.py", *asked)
    assert 0 < figures["off_1_disagreement"] < figures["off_1_disagreement_tokens"] < 0.5
    assert figures["replay_1_k3"] < figures["off_1_k3"]
