"""Loading: composition, overrides and types."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_vl.config import Config, changed_keys, load_config, save_config
from rlinf_vl.config.automatic import settle_without_ledger
from rlinf_vl.config.load import examples
from rlinf_vl.config.placement import parse_placement

TOY = "toy-grpo-cpu"


@pytest.mark.parametrize("name", sorted(examples()))
def test_every_example_loads(name):
    config = load_config(name)
    assert isinstance(config, Config)
    assert config.runner.experiment_name == name, "a run's folder is named after its config"


def test_the_two_examples_are_there():
    assert {"toy-grpo-cpu", "qwen3-vl-2b-grpo-fsdp-geo3k"} <= examples().keys()


def test_name_with_suffix_and_path(tmp_path, monkeypatch):
    assert load_config(f"{TOY}.yaml") == load_config(TOY) == load_config(str(examples()[TOY]))
    (tmp_path / "mine.yaml").write_text(
        "defaults: [rlinf_vl_schema, _self_]\nrunner: {experiment_name: x}\n"
        "rollout: {model: {model_path: toy}}\ndata: {train_data_paths: [toy]}"
    )
    monkeypatch.chdir(tmp_path)
    assert load_config("mine").runner.experiment_name == "x"


def test_working_directory_is_searched_and_can_extend_an_example(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(f"defaults: [{TOY}, _self_]\nrunner: {{seed: 7}}")
    monkeypatch.chdir(tmp_path)
    config = load_config("mine")
    assert (config.runner.seed, config.runner.seq_length) == (7, load_config(TOY).runner.seq_length)


def test_files_of_an_agents_command_are_found_from_any_folder(tmp_path, monkeypatch):
    """Beside the config, or in the working folder; the command itself is looked up in PATH."""
    configs = tmp_path / "configs"
    configs.mkdir()
    text = "rollout: {agent: {command: [python, my_agent.py, here.json, --steps, '3']}}"
    (configs / "mine.yaml").write_text(f"defaults: [{TOY}, _self_]\n{text}")
    (configs / "my_agent.py").touch()
    for name in ("here.json", "python"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    command = load_config("configs/mine.yaml").rollout.agent.command
    files = [str(configs / "my_agent.py"), str(tmp_path / "here.json")]
    assert command == ["python", *files, "--steps", "3"]


def test_folders_of_checkpoints_are_found_from_any_folder(tmp_path, monkeypatch):
    """A run that is resumed elsewhere reads the same teachers."""
    for name in ("policy", "configs/charts"):
        (tmp_path / name).mkdir(parents=True)
    distillation = "{teachers: {a: charts, b: owner/name}, teacher_key: kind}"
    text = (
        f"rollout: {{model: {{model_path: policy}}}}\nalgorithm: {{distillation: {distillation}}}"
    )
    (tmp_path / "configs/mine.yaml").write_text(f"defaults: [{TOY}, _self_]\n{text}")
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/mine.yaml")
    assert config.rollout.model.model_path == str(tmp_path / "policy")
    teachers = {"a": str(tmp_path / "configs/charts"), "b": "owner/name"}
    assert config.algorithm.distillation.teachers == teachers


def test_overrides_of_every_kind():
    config = load_config(
        TOY,
        [
            "runner.seed=7",
            "+runner.max_steps=3",
            "++data.shuffle=false",
            "data.train_data_paths=[hf://hiyouga/geometry3k:train, toy]",
            "actor.optim={lr: 1e-5, clip_grad: 2}",
            "data.seed=null",
            "runner.resume_dir=null",
            "data.system_prompt='a, b'",
            "cluster.component_placement={actor: 0-3, rollout: '4,6'}",
        ],
    )
    assert (config.runner.seed, config.data.seed, config.runner.max_steps, config.data.shuffle) == (
        7,
        7,
        3,
        False,
    )
    assert config.data.train_data_paths == ["hf://hiyouga/geometry3k:train", "toy"]
    assert (config.actor.optim.lr, config.actor.optim.clip_grad) == (1e-5, 2.0)
    assert config.actor.optim.lr_warmup_steps == 5, (
        "an override of a section is merged with the YAML's"
    )
    assert config.data.system_prompt == "a, b"
    assert config.cluster.component_placement == {"actor": "0-3", "rollout": "4,6"}, (
        "replaced, not merged"
    )


def test_an_override_names_a_key_within_a_mapping():
    config = load_config(
        TOY,
        [
            "rollout.env_kwargs={size: 3, make: {a: 1, b: {c: 2}}}",
            "rollout.env_kwargs.size=4",
            "rollout.env_kwargs.make.b.c=5",
            "rollout.env_kwargs.new.deep=6",
        ],
    )
    assert config.rollout.env_kwargs == {
        "size": 4,
        "make": {"a": 1, "b": {"c": 5}},
        "new": {"deep": 6},
    }


def test_a_local_file_can_be_named_in_an_override(tmp_path):
    path = tmp_path / "b.parquet"
    path.touch()
    assert load_config(TOY, [f"data.train_data_paths=[{path}]"]).data.train_data_paths == [
        str(path)
    ]


def test_placement_entry_is_dropped_by_null():
    overrides = [r"cluster.component_placement={actor\,rollout: all, actor: null}"]
    found = parse_placement(load_config(TOY, overrides).cluster.component_placement)
    assert {component: entry.text for component, entry in found.items()} == {
        "actor": "all",
        "rollout": "all",
    }


def test_an_empty_section_is_none(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [{TOY}, _self_]\nreward:\n")
    assert load_config(str(tmp_path / "mine.yaml")).reward == load_config(TOY).reward


@pytest.mark.parametrize(
    ("given", "kept"),
    [("true", "true"), ("false", "false"), ("'true'", "true"), ("True", "true"), ("auto", "auto")],
)
def test_recompute_logprobs_takes_booleans_and_words(tmp_path, given, kept):
    plain = "algorithm.importance_sampling_fix=false"
    assert (
        load_config(
            TOY, [f"algorithm.recompute_logprobs={given}", plain]
        ).algorithm.recompute_logprobs
        == kept
    )
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [{TOY}, _self_]\nalgorithm: {{recompute_logprobs: {given}}}"
    )
    assert load_config(str(tmp_path / "mine.yaml"), [plain]).algorithm.recompute_logprobs == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("k2", "k2"), ("abs", "abs")],
)
def test_kl_names(given, kept):
    assert (
        load_config(TOY, [f"algorithm.kl_penalty_type={given}"]).algorithm.kl_penalty_type == kept
    )


def test_null_max_new_tokens_is_what_is_left():
    nulls = [
        f"algorithm.{name}.max_new_tokens=null"
        for name in ("sampling_params", "val_sampling_params")
    ]
    algorithm = load_config(
        TOY, [*nulls, "runner.seq_length=100", "data.max_prompt_length=64"]
    ).algorithm
    assert (
        algorithm.sampling_params.max_new_tokens
        == algorithm.val_sampling_params.max_new_tokens
        == 36
    )


def test_saved_config_is_read_back(tmp_path):
    config = load_config(
        TOY,
        ["data.seed=${runner.seed}", "algorithm.clip_ratio_c=3", "data.prompt_suffix='\\boxed{}'"],
    )
    save_config(config, tmp_path / "run" / "config.yaml")
    assert "${" not in (tmp_path / "run" / "config.yaml").read_text()
    assert load_config(str(tmp_path / "run" / "config.yaml")) == config


@pytest.mark.slow
def test_loading_imports_nothing_heavy():
    code = (
        f"import sys; from rlinf_vl.config import load_config; load_config({TOY!r}); "
        "sys.exit(', '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("written", "mode"),
    [("true", "full"), ("false", "none"), ("full", "full"), ("mlp", "mlp"), ("auto", "auto")],
)
def test_checkpointing_is_switched_as_before_or_by_mode(written, mode):
    config = load_config("toy-grpo-cpu", [f"actor.fsdp_config.gradient_checkpointing={written}"])
    assert config.actor.fsdp_config.gradient_checkpointing == mode


def test_what_a_start_has_settled_is_no_change(tmp_path):
    """A run's config.yaml has `none` where its config says auto; resumed, it has changed nothing."""
    config = load_config("toy-grpo-cpu", ["actor.fsdp_config.gradient_checkpointing=auto"])
    settled = copy.deepcopy(config)
    settle_without_ledger(settled, "cpu")
    assert settled.actor.fsdp_config.gradient_checkpointing == "none"
    assert settled.actor.fsdp_config.reshard_after_forward is True
    save_config(settled, tmp_path / "config.yaml")
    assert changed_keys(config, tmp_path / "config.yaml") == []
    config.actor.fsdp_config.gradient_checkpointing = "full"
    assert len(changed_keys(config, tmp_path / "config.yaml")) == 1
