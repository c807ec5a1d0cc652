"""Other systems' configs as ours. The files here are ours, written from the systems' documented keys."""

import json
import re

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config import config_keys, parse_config
from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.config.validate import validate_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert import quantities as rules
from rlinf_vl.tools.convert.convert import convert, convert_file
from rlinf_vl.tools.convert.explain import explain
from rlinf_vl.tools.convert.render import render, summary
from rlinf_vl.tools.convert.tables import quantities, table
from rlinf_vl.tools.convert.values import CONVERSIONS

VERL = """
ENGINE=${1:-vllm}
prompt_length=$((512 * 2))
DATA="$HOME/data/geo3k"   # a comment with a "quote
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet \\
    data.train_batch_size=512 data.max_prompt_length=$prompt_length data.max_response_length=2048 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \\
    actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 \\
    trainer.logger='["console","tensorboard"]' trainer.test_freq=5 trainer.total_epochs=15 $@
"""
EASYR1 = """
data: {train_files: owner/rows@train, val_files: owner/rows@test, prompt_key: problem, max_response_length: 1024,
       rollout_batch_size: 512, format_prompt: ./think.jinja}
algorithm: {adv_estimator: grpo, use_kl_loss: true, kl_penalty: mse, kl_coef: 1e-2}
worker:
  actor:
    {global_batch_size: 128, clip_ratio_high: 0.28,
     model: {model_path: owner/model, lora: {rank: 64, exclude_modules: .*visual.*}}}
  rollout: {n: 5, val_override_config: {temperature: 0.6, top_p: 0.95}}
trainer: {experiment_name: mine, logger: [console], max_steps: null, val_freq: 5, save_limit: 3}
"""
RLINF = """
defaults: [../hybrid_engines/fsdp@actor.fsdp_config, {override hydra/job_logging: stdout}]
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": all}}
runner: {task_type: reasoning, max_epochs: 25, seq_length: 8192, max_tokens_per_mbs: 8192, experiment_name: geo}
algorithm:
  group_size: 8
  n_minibatches: 2
  recompute_logprobs: True
  importance_sampling_fix: True
  ratio_clip_eps: 0.1
  clip_ratio_low: null
  clip_ratio_high: 0.28
  kl_penalty_type: low_var_kl
  early_stop_imp_ratio: 5.0
  sampling_params: {do_sample: True, top_k: 1000000, max_new_tokens: "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"}
rollout: {group_name: RolloutGroup, rollout_backend: vllm, model: {model_path: toy, model_type: qwen2.5_vl}, enforce_eager: False}
data: {type: vlm, max_prompt_length: 4096, rollout_batch_size: 64, train_data_paths: [toy]}
actor: {global_batch_size: "${int_div:${multiply:${algorithm.group_size}, ${data.rollout_batch_size}}, ${algorithm.n_minibatches}}"}
reward: {reward_type: math, reward_scale: 5.0, reward_min_val: 0}
"""
SKYRL = """
: "${NUM_GPUS:=4}" # so many "cards"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$HOME/data/train.parquet']" trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \\
  trainer.algorithm.policy_loss_type="dual_clip" trainer.algorithm.clip_ratio_c=10.0 trainer.algorithm.use_kl_loss=false \\
  trainer.algorithm.loss_reduction="sequence_mean" trainer.policy.model.path="owner/model" \\
  trainer.train_batch_size=128 trainer.policy_mini_batch_size=64 generator.n_samples_per_prompt=4 \\
  trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024 generator.max_turns=3 \\
  environment.env_class=gsm8k trainer.resume_mode=null trainer.run_name="mine" "$@"
"""
TRL = """
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

model_id, name = "owner/model", "my-run"
dataset = load_dataset("owner/rows", split="train")
args = GRPOConfig(
    output_dir=f"x" if False else name, num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=4,
    steps_per_generation=8, max_completion_length=256, max_steps=100, loss_type="dr_grpo", scale_rewards=False, beta=0.04,
    epsilon_high=0.28, learning_rate=2e-5, save_steps=10, use_vllm=True, generation_kwargs={"seed": len(dataset)},
)
trainer = GRPOTrainer(model=model_id, reward_funcs=[accuracy_reward], args=args, train_dataset=dataset,
                      peft_config=LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
"""
OF_THE_MACHINE = re.compile(r"no (file|folder) ['\"]|is not installed")
#: File's text, its name, and settings that must come of it.
CASES = {
    "verl": (VERL, "run.sh", {
        "data.train_data_paths": ["~/data/geo3k/train.parquet"], "data.rollout_batch_size": 512, "algorithm.n_minibatches": 4,
        "algorithm.group_size": 5, "data.max_prompt_length": 1024, "runner.seq_length": 3072, "runner.max_tokens_per_mbs": 30720,
        "algorithm.sampling_params.max_new_tokens": 2048, "algorithm.kl_beta": 0.01, "algorithm.kl_penalty_type": "k3",
        "algorithm.clip_ratio_c": 3.0, "actor.model.freeze_vision_tower": False, "rollout.rollout_backend": "sglang",
        "algorithm.val_sampling_params.temperature": 0.0, "runner.val_check_interval": 5, "runner.max_epochs": 15,
        "actor.optim.lr": 1e-6, "algorithm.importance_sampling_fix": False, "runner.logger.logger_backends": ["tensorboard"],
    }),
    "easyr1": (EASYR1, "config.yaml", {
        "data.train_data_paths": ["hf://owner/rows:train"], "algorithm.kl_penalty_type": "k2", "algorithm.kl_beta": 0.01,
        "data.prompt_suffix": " Think first.", "algorithm.n_minibatches": 4, "algorithm.clip_ratio_low": 0.2,
        "algorithm.clip_ratio_high": 0.28, "actor.model.is_lora": True, "actor.model.lora.rank": 64, "actor.model.lora.alpha": 64.0,
        "actor.model.lora.target_modules": ["language"], "algorithm.val_sampling_params.top_p": 0.95, "runner.keep_last": 3,
        "data.image_max_pixels": 4194304, "runner.experiment_name": "mine",
    }),
    "rlinf": (RLINF, "geo.yaml", {
        "cluster.component_placement": {"actor,rollout": "all"}, "algorithm.recompute_logprobs": "auto",
        "algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.28, "algorithm.sampling_params.max_new_tokens": 4096,
        "algorithm.sampling_params.top_k": 0, "reward.reward_max_val": 5.0, "reward.reward_min_val": 0.0,
        "rollout.model.model_type": "qwen2_5_vl", "algorithm.n_minibatches": 2, "runner.max_tokens_per_mbs": 8192,
    }),
    "skyrl": (SKYRL, "run.sh", {
        "algorithm.clip_ratio_c": 10.0, "algorithm.kl_beta": 0.0, "algorithm.loss_agg_func": "seq-mean-token-mean",
        "algorithm.n_minibatches": 2, "runner.resume_dir": None, "rollout.max_turns": 3, "runner.save_interval": 10,
        "data.train_data_paths": ["~/data/train.parquet"], "rollout.env_class": "single_turn",
    }),
    "trl": (TRL, "train.py", {
        "data.rollout_batch_size": 16, "algorithm.n_minibatches": 2, "runner.max_steps": 50, "runner.save_interval": 5,
        "algorithm.loss_agg_func": "seq-mean-token-sum-norm", "algorithm.normalize_advantages": False, "algorithm.kl_beta": 0.04,
        "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.28, "rollout.model.model_path": "owner/model",
        "actor.model.lora.target_modules": ["q_proj", "v_proj"], "data.train_data_paths": ["hf://owner/rows:train"],
        "actor.optim.lr_scheduler": "linear", "runner.val_check_interval": -1,
    }),
}  # fmt: skip


def made_of(tmp_path, text, name, system=None):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    (tmp_path / "think.jinja").write_text("{{ content | trim }} Think first.", encoding="utf-8")
    return convert_file(path, system)


def accepted(tmp_path, made):
    """The problems of what is written, but those of the machine: data, models, packages."""
    path = tmp_path / "ours.yaml"
    path.write_text(render(made, "theirs"), encoding="utf-8")
    try:
        validate_config(parse_config(str(path)))
    except ConfigError as error:
        return [text for text in error.problems if not OF_THE_MACHINE.search(text)]
    return []


@pytest.mark.parametrize("system", CASES)
def test_settings_keep_their_meaning(tmp_path, system):
    text, name, expected = CASES[system]
    made = made_of(tmp_path, text, name)
    assert made.system == SYSTEMS[system]
    assert {key: made.written.get(key, config_keys()[key].default) for key in expected} == expected
    assert not made.of("unknown")
    assert accepted(tmp_path, made) == []


def test_a_converted_accuracy_reward_says_that_only_boxed_answers_are_paid(tmp_path):
    text = render(
        made_of(
            tmp_path,
            TRL.replace("[accuracy_reward]", "[think_format_reward, accuracy_reward]"),
            "train.py",
        ),
        "train.py",
    )
    (line,) = [line for line in text.splitlines() if "function: math" in line]
    assert (
        "math pays an answer in \\boxed{} only" in text and "accuracy_reward reads others" in text
    ), line
    made = made_of(
        tmp_path, TRL.replace("[accuracy_reward]", "[get_soft_overlong_punishment]"), "train.py"
    )
    assert "boxed" not in render(made, "train.py")


def test_rewards_that_trl_normalizes_one_by_one_are_so_here(tmp_path):
    gdpo = 'scale_rewards=False, multi_objective_aggregation="normalize_then_sum"'
    made = made_of(tmp_path, TRL.replace("scale_rewards=False", gdpo), "train.py")
    assert made.written["algorithm.reward_normalization"] == "per_reward"
    assert accepted(tmp_path, made) == [], "its scale_rewards does not count then"


def test_every_key_has_an_outcome_and_is_named_in_what_is_written(tmp_path):
    made = made_of(
        tmp_path,
        VERL.replace("$@", "nobody.knows=1 actor_rollout_ref.actor.ppo_epochs=2 $@"),
        "run.sh",
    )
    text = render(made, "run.sh")
    assert len(made.outcomes) == 21 + 2 + 1  # the reward, which verl chooses by data_source
    for outcome in made.outcomes.values():
        assert outcome.key in text.replace("\n#   ", " "), outcome
    assert [o.key for o in made.of("unknown")] == ["nobody.knows"]
    (refused, _) = made.of("refused")
    assert refused.key.endswith("ppo_epochs") and "n_minibatches" in refused.text
    assert "2 refused, 1 unknown" in summary(made, "run.sh")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_any_values_of_known_keys_are_accepted_or_refused(tmp_path, system):
    known = table(system)
    for sample in (True, 3, "x"):
        said = {}
        for key, row in known.rows.items():
            choices = [*(row.values or ()), *(row.same or ())]
            said[key] = choices[0] if choices and sample == 3 else sample
        path = tmp_path / "all.json"
        path.write_text(json.dumps(said))
        made = convert_file(path, system)
        assert len(made.outcomes) >= len({key.split(".")[0] for key in said})
        assert accepted(tmp_path, made) == []


def test_tables_name_only_what_there_is():
    for name in SYSTEMS:
        known = table(name)
        for row in (*known.rows.values(), *known.patterns):
            assert row.kind == "mapped" or row.why or row.same is not None, row
            assert not row.by or row.by in CONVERSIONS, row
            assert not row.role or row.role in quantities(), row
        assert set(known.always) <= {*config_keys(), "data.format"}


@pytest.mark.parametrize(
    ("said", "problems", "parts"),
    [
        ({"data.train_batch_size": 96, "actor_rollout_ref.actor.ppo_mini_batch_size": 32}, 96, 3),
        (
            {"data.train_batch_size": 100, "actor_rollout_ref.actor.ppo_mini_batch_size": 32},
            100,
            2,
        ),  # 3.1 parts: 2 divides 100
        ({"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 256}, 8, 1),
    ],
)
def test_batches_of_problems(said, problems, parts):
    made = convert(table("verl"), said, lambda _: None, "x")
    assert made.written["data.rollout_batch_size"] == problems
    assert made.written.get("algorithm.n_minibatches", 1) == parts


@pytest.mark.parametrize(
    ("said", "problems", "parts"),
    [
        ({"per_device_train_batch_size": 8, "num_processes": 4, "num_generations": 8}, 4, 1),
        (
            {
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "num_generations": 8,
            },
            2,
            1,
        ),
        ({"per_device_train_batch_size": 8, "steps_per_generation": 4, "num_generations": 8}, 4, 4),
        (
            {"per_device_train_batch_size": 8, "generation_batch_size": 64, "num_generations": 4},
            16,
            8,
        ),
    ],
)
def test_batches_of_responses(said, problems, parts):
    made = convert(table("trl"), said, lambda _: None, "x")
    assert made.written["data.rollout_batch_size"] == problems
    assert made.written.get("algorithm.n_minibatches", 1) == parts


def test_a_share_of_warm_up_needs_the_runs_length():
    ratio = "worker.actor.optim.lr_warmup_ratio"
    said = {
        ratio: 0.1,
        "data.rollout_batch_size": 64,
        "worker.actor.global_batch_size": 32,
        "trainer.max_steps": 50,
    }
    assert (
        convert(table("easyr1"), said, lambda _: None, "x").written["actor.optim.lr_warmup_steps"]
        == 10
    )
    del said["trainer.max_steps"]
    (refused,) = convert(table("easyr1"), said, lambda _: None, "x").of("refused")
    assert refused.key == ratio and "actor.optim.lr_warmup_steps" in refused.text


DISTILLED = {
    "distillation.enabled": True,
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.use_task_rewards": False,
}


def test_one_teacher_teaches_all_rows():
    model = "distillation.teacher_models.teacher_model"
    said = DISTILLED | {f"{model}.model_path": "owner/math", f"{model}.inference.name": "vllm"}
    made = convert(table("verl"), said, lambda _: None, "x")
    assert made.written["algorithm.distillation.teacher_path"] == "owner/math"
    assert made.written["algorithm.distillation.reward_weight"] == 0.0
    assert "algorithm.distillation.teachers" not in made.written
    assert "algorithm.distillation.teacher_key" not in made.written
    assert not [
        o for o in made.outcomes.values() if "teacher" in o.key and o.kind in ("refused", "unknown")
    ]


@pytest.mark.parametrize("column", [None, "kind"])
def test_several_teachers_teach_the_rows_of_their_labels(column):
    said = DISTILLED | {
        "distillation.teacher_models.math.model_path": "owner/math",
        "distillation.teacher_models.math.key": "openai/gsm8k",
        "distillation.teacher_models.math.num_replicas": 2,
        "distillation.teacher_models.maps.model_path": "owner/maps",
    }
    if column:
        said["distillation.teacher_key"] = column
    made = convert(table("verl"), said, lambda _: None, "x")
    assert made.written["algorithm.distillation.teachers"] == {
        "openai/gsm8k": "owner/math",
        "maps": "owner/maps",
    }
    assert made.written["algorithm.distillation.teacher_key"] == (column or "data_source")
    assert "algorithm.distillation.teacher_path" not in made.written
    assert not [
        o for o in made.outcomes.values() if "teacher" in o.key and o.kind in ("refused", "unknown")
    ]


def test_gdpo_is_refused_with_what_it_is_here():
    said = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_weights": [1.0, 0.5]}
    made = convert(table("verl"), said, lambda _: None, "x")
    reasons = {o.key: o.text for o in made.of("refused")}
    assert all("algorithm.reward_normalization=per_reward" in reasons[key] for key in said)


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        ({"tis": "sequence", "tis_clip": 2.0, "rejection": "geometric", "rejection_bounds": "0.8_1.6"},  # verl's are of 1/ρ
         {"rejection.level": "geometric", "rejection.low": 0.625, "rejection.high": 1.25, "importance_sampling_clip": 2.0}),
        ({"rejection": "sequence", "rejection_bounds": 2.0}, {"rejection.low": 0.5, "rejection.high": 2.0}),
        ({"tis": "token", "tis_clip": "0.5_5.0"},  # IcePop's of ρ
         {"rejection.level": "token", "rejection.low": 0.5, "rejection.high": 5.0, "importance_sampling_clip": 5.0}),
        ({"tis": "sequence_mask", "tis_clip": 3.0, "veto": 1e-4},
         {"rejection.level": "sequence", "rejection.low": 0.0, "rejection.high": 3.0, "importance_sampling_level": "sequence",
          "rejection.veto": 1e-4}),
        ({"rejection": "geometric", "rejection_low": 0.5, "rejection_geometric_low": 0.98}, {"rejection.low": 0.98}),
    ],
)  # fmt: skip
def test_rejection_keeps_its_bounds(said, ours):
    made = {
        d.key.removeprefix("algorithm."): d.value
        for d in rules.correction(rules.Quantities(said, {}, lambda _: None))
    }
    assert {key: made[key] for key in ours} == ours


@pytest.mark.parametrize(
    ("name", "ours"), [("low_var_kl", "k3"), ("mse", "k2"), ("abs", "abs"), ("kl", "k3")]
)
def test_names_of_divergences(name, ours):
    said = {"algorithm.use_kl_loss": True, "algorithm.kl_penalty": name, "algorithm.kl_coef": 0.1}
    made = convert(table("easyr1"), said, lambda _: None, "x")
    assert made.written.get("algorithm.kl_penalty_type", "k3") == ours
    assert bool(made.of("refused")) == (name == "kl")  # its gradient in the loss is zero


def test_a_base_that_is_missing_is_named_and_one_that_is_near_is_read(tmp_path):
    script = "python3 -m verl.trainer.main config=examples/config.yaml worker.rollout.n=3 trainer.save_freq=7 data.seed=2\n"
    made = made_of(tmp_path, script, "run.sh")
    assert made.missing == ["examples/config.yaml"]
    (refused,) = made.of("refused")
    assert "examples/config.yaml" in refused.key and "convert again" in refused.text
    # What only the class of EasyR1 says is a guess, in the summary and beside each value.
    assert (
        "algorithm.clip_ratio_high" in refused.text and "algorithm.group_size" not in refused.text
    )
    assert (
        "examples/config.yaml may say otherwise"
        in made.settings["algorithm.clip_ratio_high"].comment
    )
    assert "# - config examples/config.yaml=not found" in render(made, "run.sh")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text("worker: {rollout: {n: 9, temperature: 0.5}}\n")
    made = made_of(tmp_path, script, "run.sh")
    assert not made.missing
    assert made.written["algorithm.group_size"] == 3
    assert made.written["algorithm.sampling_params.temperature"] == 0.5
    assert not made.of("refused") and "may say otherwise" not in render(made, "run.sh")


def test_the_base_whose_values_are_known_is_not_missing(tmp_path):
    script = (
        "python3 -m verl.trainer.main_ppo --config-name=ppo_trainer actor_rollout_ref.rollout.n=3\n"
    )
    assert not made_of(tmp_path, script, "run.sh").missing


def test_a_shells_arrays_sums_and_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_OUTSIDE", "owner/model")
    script = """
        ARGS=(
            data.train_batch_size=$((2 * (3 + 5)))   # problems
            data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']"
        )
        ARGS+=( actor_rollout_ref.model.path=$FROM_OUTSIDE )
        NAME=run_$(date +%s)
        CUDA_VISIBLE_DEVICES=0 python -m verl.trainer.main_ppo "${ARGS[@]}" trainer.experiment_name="${NAME}x" \\
            data.max_prompt_length=$NOWHERE || exit 1
    """
    made = made_of(tmp_path, script, "run.sh")
    assert made.written["data.rollout_batch_size"] == 16
    assert made.written["data.train_data_paths"] == ["~/a.parquet", "~/b.parquet"]
    assert made.written["rollout.model.model_path"] == "owner/model"
    assert made.written["runner.experiment_name"] == "run_x"
    (refused,) = (o for o in made.of("refused") if o.key == "data.max_prompt_length")
    assert "$NOWHERE" in refused.text


def test_unquoted_variables_are_split_as_a_shell_does_and_every_word_is_accounted_for(tmp_path):
    script = """
        DATA="data.train_batch_size=24 data.max_response_length=77"
        MORE='trainer.total_epochs=3 trainer.save_freq=9'
        NAME="two words"
        LIST="['a.parquet', 'b.parquet']"
        python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo $DATA ${MORE} \\
            trainer.experiment_name="$NAME" data.train_files="$LIST" trainer.default_local_dir='$HOME/x y' \\
            stray $UNSET 2>&1 | tee log.txt
    """
    made = made_of(tmp_path, script, "run.sh")
    assert made.written["data.rollout_batch_size"] == 24
    assert made.written["algorithm.sampling_params.max_new_tokens"] == 77
    assert (made.written["runner.max_epochs"], made.written["runner.save_interval"]) == (3, 9)
    assert made.written["runner.experiment_name"] == "two-words"
    assert made.written["data.train_data_paths"] == ["a.parquet", "b.parquet"]
    refused = {outcome.key for outcome in made.of("refused")}
    assert {"word stray"} == {key for key in refused if key.startswith("word")} and not any(
        "UNSET" in key or "2>" in key for key in refused
    )


def test_verls_reward_by_data_source_is_refused_by_name(tmp_path):
    made = made_of(tmp_path, VERL, "run.sh")
    assert "grades each row" in made.outcomes["data_source"].text
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth): ..."
    )
    own = VERL.replace("$@", "custom_reward_function.path=mine.py $@")
    assert "data_source" not in made_of(tmp_path, own, "run.sh").outcomes


@pytest.mark.parametrize(
    "lines, refused, functions",
    [
        ("def accuracy_reward(completions, **row): return []", ["accuracy_reward"], []),
        ("from mine.rewards import accuracy_reward", [], ["mine.rewards:accuracy_reward"]),
        ("from .rewards import accuracy_reward", ["accuracy_reward"], []),
        ("from trl.rewards import accuracy_reward", [], ["math"]),
    ],
)
def test_a_function_of_the_users_is_theirs_whatever_its_name(tmp_path, lines, refused, functions):
    text = f"{lines}\nGRPOTrainer(model='m', reward_funcs=accuracy_reward, args=GRPOConfig(beta=0.1))\n"
    made = made_of(tmp_path, text, "mine.py")
    assert [f["function"] for f in made.written.get("reward.functions", [])] == functions
    texts = [o.text for o in made.of("refused") if "reward" in o.key]
    assert [f"path/to/file.py:{name}" in "".join(texts) for name in refused] == [True] * len(
        refused
    )
    assert bool(refused) == bool(texts)


@pytest.mark.parametrize(
    "text, name",
    [
        ("RLOOTrainer(model='m', args=RLOOConfig(beta=0.1), reward_funcs=f)", "mine.py"),
        ("trl rloo --model_name_or_path m --beta 0.1 --dataset_name d", "run.sh"),
        ("accelerate launch examples/scripts/rloo_vlm.py --beta 0.1 --dataset_name d", "run.sh"),
    ],
)
def test_another_trainer_is_refused_and_not_read_with_grpos_defaults(tmp_path, text, name):
    with pytest.raises(ConfigError, match="algorithm.adv_type=rloo"):
        made_of(tmp_path, text, name)


def test_rlinf_runs_as_it_is_where_it_has_a_meaning(tmp_path):
    path = tmp_path / "geo.yaml"
    path.write_text(RLINF)
    config = parse_config(str(path), ["runner.max_steps=3"])
    assert (config.runner.max_steps, config.algorithm.sampling_params.max_new_tokens) == (3, 4096)
    assert config.cluster.component_placement == {"actor,rollout": "all"}
    validate_config(config)
    path.write_text(RLINF.replace("reward_type: math", "reward_type: mine"))
    with pytest.raises(ConfigError, match="reward.reward_type: 'mine'"):
        parse_config(str(path))


@pytest.mark.parametrize(
    ("key", "system", "lines"),
    [
        (
            "rollout.n",
            None,
            [
                "verl: actor_rollout_ref.rollout.n",
                "  here algorithm.group_size; 1 where their file does not set it",
                "EasyR1: worker.rollout.n",
                "  here algorithm.group_size; 1 where their file does not set it",
            ],
        ),
        (
            "num_iterations",
            "trl",
            [
                "TRL: num_iterations",
                "  refused unless it is 1: a batch is trained on once; "
                "algorithm.n_minibatches makes the optimizer steps",
            ],
        ),
        ("policy_loss", "skyrl", ["SkyRL: policy/policy_loss (a metric)", "  here actor/loss"]),
    ],
)
def test_a_key_is_explained(key, system, lines):
    assert explain(key, system).splitlines() == lines


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_key_and_metric_is_explained(system):
    known = table(system)
    for name in (*known.rows, *known.metrics, *(row.theirs for row in known.patterns)):
        assert explain(name, system).startswith(f"{known.name}: ")


def test_what_cannot_be_explained_is_refused(capsys):
    with pytest.raises(ConfigError, match="no key or metric of TRL; did you mean 'beta'?"):
        explain("betta", "trl")
    for arguments in ([], ["mine.yaml", "--explain", "beta"]):
        assert main(["convert-config", *arguments]) == 2
        assert "takes a file, or --explain KEY" in capsys.readouterr().err
