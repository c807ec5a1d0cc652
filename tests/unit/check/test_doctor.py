"""`doctor`: the facts of a machine, what of them is judged, and the exit code. Each fault: tests/golden/refusals.txt."""

import dataclasses
import os
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config.load import parse_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.check import doctor
from rlinf_vl.tools.check import machine as machine_facts

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
GIB = 2**30
PAGES = runpy.run_path(str(Path(__file__).parents[3] / "docs/generate_memory_page.py"))
GPUS = PAGES["host"](8)
CPU = PAGES["TESTS"]


def lines(machine, *overrides, config=FLAGSHIP):
    found = doctor.check(machine, parse_config(config, overrides) if config else None)
    return {line.subject: line for line in found}


def test_a_machine_that_has_everything_has_no_other_line():
    assert {line.status for line in lines(GPUS).values()} == {"ok"}


FABRIC = dataclasses.replace(
    GPUS, cluster="10.0.0.1:6379", adapters=("mlx5_0", "mlx5_1"), has_verbs=True
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "transport"),
    [
        ({}, "by mlx5_0, mlx5_1"),
        ({"adapters": ()}, "TCP"),
        ({"environment": {"NCCL_IB_HCA": "mlx5_1"}}, "by mlx5_1"),
        ({"environment": {"NCCL_NET": "Socket"}}, "NCCL_NET=Socket"),
    ],
)
def test_the_transport_between_machines_is_named(facts, transport):
    network = lines(dataclasses.replace(FABRIC, **facts), "cluster.num_nodes=2")["network"]
    assert network.status == "ok" and transport in network.text
    assert "network" not in lines(dataclasses.replace(FABRIC, **facts))  # one machine


def test_a_cpu_cluster_has_the_slots_that_are_named():
    split = "cluster.component_placement={actor: 0-1, rollout: 2}"
    found = lines(dataclasses.replace(CPU, cores=2), split, config="toy-grpo-cpu")
    assert (
        not [line for line in found.values() if line.status == "fail"]
        and found["cores"].status == "warn"
    )
    there = dataclasses.replace(CPU, cores=2, cluster="10.0.0.1:6379", cluster_answers=True)
    # One that is joined has what it has.
    assert lines(there, split, config="toy-grpo-cpu")["slots"].status == "warn"


def test_allocator_settings_that_the_memory_saver_refuses():
    for value, status in (("max_split_size_mb:64", None), ("expandable_segments:True", "warn")):
        found = lines(dataclasses.replace(GPUS, environment={"PYTORCH_ALLOC_CONF": value}))
        assert (found["environment"].status if "environment" in found else None) == status


def test_packages_of_hubs_are_judged_where_they_are_installed():
    packages = GPUS.packages | {"verifiers": "0.3.1", "openenv": "0.9.0", "miniwob": None}
    found = lines(dataclasses.replace(GPUS, packages=packages))
    assert found["verifiers"].status == "ok" and "miniwob" not in found
    assert (
        found["openenv"].status == "warn" and "not tested; tested: 0.10.0" in found["openenv"].text
    )


@pytest.mark.slow
def test_packages():
    packages = GPUS.packages | {"torch": "2.12.1+cu130", "ray": None, "sglang": None}
    found = lines(dataclasses.replace(GPUS, packages=packages))
    assert found["torch"].status == "warn" and "2.13.0, 2.14.1" in found["torch"].text
    assert found["ray"].status == found["sglang"].status == "fail"
    assert "install.sh --sglang" in found["sglang"].text
    assert "SGLang's tools" not in found  # without SGLang its tools say nothing
    without = lines(dataclasses.replace(GPUS, packages=packages), "rollout.rollout_backend=torch")
    assert "sglang" not in without
    assert (
        lines(dataclasses.replace(GPUS, packages=GPUS.packages | {"torch": "2.13.0+cpu"}))[
            "torch"
        ].status
        == "ok"
    )
    assert (
        lines(dataclasses.replace(GPUS, packages=GPUS.packages | {"torch": "2.13.01"}))[
            "torch"
        ].status
        == "warn"
    )


def test_the_head_of_a_cluster_needs_no_gpu():
    head = dataclasses.replace(CPU, cluster="10.0.0.1:6379")
    assert not [
        line for line in lines(head, "cluster.num_nodes=2").values() if line.status == "fail"
    ]
    assert [line for line in lines(CPU).values() if line.status == "fail"]


@pytest.mark.slow
def test_image_tokens_by_arithmetic(tmp_path):
    assert "at most 512 an image (32 × 32 pixels" in lines(GPUS)["image tokens"].text
    large = lines(GPUS, "data.image_max_pixels=2000000")["image tokens"]
    assert large.status == "warn" and "at most 1953" in large.text
    assert "no images" in lines(GPUS, "data.image_keys=[]")["image tokens"].text
    from tiny import tiny_model

    tiny_model().config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": {"longest_edge": 6400, "shortest_edge": 64}}'
    )
    own = lines(GPUS, "data.image_max_pixels=null", f"rollout.model.model_path={tmp_path}")[
        "image tokens"
    ]
    assert "at most 100 an image (8 × 8 pixels" in own.text
    tiny_model(family="qwen3").config.save_pretrained(tmp_path)
    assert "image tokens" not in lines(GPUS, f"rollout.model.model_path={tmp_path}")


def test_versions_are_compared_with_those_that_the_environment_was_made_with(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / ".rlinf_vl").write_text(
        f"key=1\nversion.torch={version('torch')}\nversion.ray=2.1\nversion.gone=3\n"
    )
    machine = machine_facts.look()
    assert machine.moved == (f"ray 2.1 → {version('ray')}", "gone 3 → none")
    assert machine.restore == f"bash requirements/install.sh --venv {tmp_path}"
    (tmp_path / ".rlinf_vl").write_text("key=1\n")
    assert machine_facts.look().moved == ()


def test_this_machine_is_looked_at():
    """Every fact is of the right kind, and a CPU run of the toy is not refused here."""
    config = parse_config("toy-grpo-cpu")
    machine = machine_facts.look(config)
    assert machine.python == ".".join(map(str, sys.version_info[:3])) and machine.packages["torch"]
    assert machine.total_memory > GIB and machine.cores >= 1 and machine.ports > 0
    assert machine.run_disk > 0 and machine.cache_disk > 0 and not machine.cluster
    assert machine.missing_tools == (), "the torch engine compiles nothing"
    doctor.refuse(config)


def test_the_loader_is_asked_under_the_engines_environment(tmp_path, monkeypatch):
    """A library with libraries that are nowhere: `ldd` names them. One that LD_LIBRARY_PATH finds is not named."""
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(machine_facts, "HOOK", "hook.so")
    if os.system("cc --version > /dev/null 2>&1"):
        pytest.skip("no C compiler")
    build = f"cd {tmp_path} && mkdir there && echo 'int f(void){{return 1;}}' > f.c && cc -shared -fPIC -o there/libabsent.so f.c"
    assert (
        os.system(f"{build} && cc -shared -fPIC -o hook.so f.c -Wl,--no-as-needed -Lthere -labsent")
        == 0
    )
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert machine_facts._missing_libraries() == ("libabsent.so",)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "there"))
    assert machine_facts._missing_libraries() == ()


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(unsigned long)(i + 1); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = (unsigned long long)h << 30; return 0; }
"""


def test_gpus_are_asked_of_the_driver_and_torch_is_left_alone(tmp_path):
    """A stand-in for NVML with GPUs of 1 and 2 GiB; nothing of CUDA is started to ask."""
    if os.system("cc --version > /dev/null 2>&1"):
        pytest.skip("no C compiler")
    (tmp_path / "nvml.c").write_text(NVML)
    assert os.system(f"cd {tmp_path} && cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c") == 0
    code = "from rlinf_vl.runtime.gpus import gpu_memory; import sys; print(gpu_memory(), 'torch' in sys.modules)"
    for visible, said in ((None, f"({GIB}, {2 * GIB}) False"), ("0", f"({GIB},) False")):
        environment = (
            os.environ
            | {"LD_LIBRARY_PATH": str(tmp_path)}
            | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.stdout.strip() == said, done.stderr


def test_a_run_is_refused_before_its_folder_is_filled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_facts, "_free", lambda path: 1000)
    folder = tmp_path / "runs"
    assert main(["train", "toy-grpo-cpu", f"runner.output_dir={folder}"]) == 2
    said = capsys.readouterr().err
    assert "disk: " in said and "make room" in said and "Traceback" not in said
    assert not list(folder.rglob("*.yaml")) and not list(folder.rglob("*.json*"))
    with pytest.raises(ConfigError, match="runner.keep_last"):
        doctor.refuse(parse_config("toy-grpo-cpu"))


@pytest.mark.slow
def test_a_run_with_room_for_any_checkpoint_starts_without_a_look_at_its_weights(
    tmp_path, monkeypatch
):
    """The bound: 12 bytes for each number, of which a byte of the checkpoint has two at most."""
    from tiny import tiny_model

    tiny_model().save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    looked = []
    monkeypatch.setattr(doctor, "_of_weights", lambda *how: looked.append(how) or ())
    for free, lora, looks in (
        (24 * size, False, 0),
        (24 * size - 1, False, 1),
        (24 * size, True, 1),
    ):
        monkeypatch.setattr(machine_facts, "_free", lambda path, free=free: free)
        overrides = [f"rollout.model.model_path={tmp_path}", f"actor.model.is_lora={lora}"]
        looked.clear()
        doctor.refuse(parse_config("toy-grpo-cpu", overrides))
        assert len(looked) == looks, (free, lora)
    looked.clear()
    doctor.refuse(parse_config("toy-grpo-cpu", ["rollout.model.model_path=someone/on-the-hub"]))
    assert looked, "nothing is known of its size"


def test_the_verb(monkeypatch, capsys):
    assert main(["doctor", "toy-grpo-cpu", "runner.max_steps=3"]) == 0
    said = capsys.readouterr().out
    assert "| ok | torch |" in said and "| ok | image tokens |" in said
    assert main(["doctor"]) == 0
    assert "| ports |" in capsys.readouterr().out
    monkeypatch.setattr(machine_facts, "_ports", lambda: 0)
    assert main(["doctor"]) == 1
    assert main(["doctor", "no-such-config"]) == 2
    assert main(["doctor", "toy-grpo-cpu", "runner.max_steps=0"]) == 1
    assert "runner.max_steps" in capsys.readouterr().out


@pytest.mark.slow
def test_gated_delta_nets_on_a_gpu_want_flash_linear_attention():
    recurrent, cuda = "toy-grpo-cpu-qwen3_5", "cluster.device=cuda"
    missing = lines(GPUS, cuda, config=recurrent)["gated delta nets"]
    assert missing.status == "warn" and "pip install 'fla-core" in missing.text
    there = dataclasses.replace(GPUS, packages=GPUS.packages | {"fla-core": "0.6.0"})
    assert lines(there, cuda, config=recurrent)["gated delta nets"].status == "ok"
    assert "gated delta nets" not in lines(CPU, config=recurrent)
    assert "gated delta nets" not in lines(GPUS, cuda, config="toy-grpo-cpu")
