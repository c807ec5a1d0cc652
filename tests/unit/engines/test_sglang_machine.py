"""What an SGLang process on a GPU needs of the machine: named before anything is started."""

import os
import sys
from pathlib import Path

import pytest

from rlinf_vl.engines.sglang import machine


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Makes programs of these names, each of which prints something, the only ones that are found."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)

    def make(**programs):
        for place, said in programs.items():
            path = tmp_path / place.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\necho '{said}'\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        return tmp_path

    return make


NVCC = "Cuda compilation tools, release 13.0, V13.0.88"


def test_nothing_is_missing_where_all_is_there_and_ninja_is_beside_the_interpreter_only(
    tools, monkeypatch
):
    tools(venv__bin__ninja="", **{"bin__c++": "", "bin__nvcc": NVCC})
    assert machine.missing_tools() == []
    monkeypatch.setenv("CXX", "c++ -O1")
    assert machine.missing_tools() == []


def test_each_tool_that_is_missing_is_named_with_the_way_out(tools, monkeypatch):
    folder = tools()
    monkeypatch.setenv("CUDA_HOME", str(folder / "nowhere"))
    ninja, compiler, nvcc = machine.missing_tools()
    assert "ninja" in ninja and "pip install ninja" in ninja
    assert "'c++'" in compiler and "apt install g++" in compiler
    assert f"{folder}/nowhere/bin/nvcc" in nvcc and "CUDA_HOME=" in nvcc


def test_an_nvcc_of_another_cuda_is_named_with_its_version(tools, monkeypatch):
    folder = tools(
        venv__bin__ninja="",
        cuda__bin__nvcc=NVCC.replace("13.0,", "12.6,"),
        **{"bin__c++": "", "bin__nvcc": NVCC},
    )
    assert machine.missing_tools() == []
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))  # SGLang asks it before PATH
    (wrong,) = machine.missing_tools()
    assert "nvcc 12.6" in wrong and f"{folder}/cuda/bin/nvcc" in wrong and "CUDA 13" in wrong


def test_the_interpreters_folder_is_first_on_path_once(monkeypatch):
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"/usr/bin:{folder}:/bin")
    assert machine.cuda_environment(shared_gpu=False)["PATH"] == f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_taken_out_where_the_memory_saver_runs(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    assert name not in machine.cuda_environment(shared_gpu=False)
    assert (
        machine.cuda_environment(shared_gpu=True)[name]
        == "max_split_size_mb:64,expandable_segments:False"
    )


def test_the_folder_of_libcudart_is_first_for_the_loader(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "cudart_folder", lambda: tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    assert machine.cuda_environment(True)["LD_LIBRARY_PATH"] == os.pathsep.join(
        [str(tmp_path), "/opt/lib"]
    )
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert machine.cuda_environment(True)["LD_LIBRARY_PATH"] == str(tmp_path)


def test_the_memory_saver_keeps_its_page_locked_copy_where_engines_sleep(monkeypatch):
    monkeypatch.delenv("TMS_RETAIN_CPU_BACKUP", raising=False)
    assert machine.cuda_environment(True, keeps_copy=True)["TMS_RETAIN_CPU_BACKUP"] == "1"
    for shared in (False, True):
        assert "TMS_RETAIN_CPU_BACKUP" not in machine.cuda_environment(shared_gpu=shared)
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", "0")
    assert machine.cuda_environment(True, keeps_copy=True)["TMS_RETAIN_CPU_BACKUP"] == "0"
