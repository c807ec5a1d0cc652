"""`compare-batch`: planted differences are named, and true dumps of TRL and verl agree."""

import copy
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf_vl.__main__ import main
from rlinf_vl.actor.loss import micro_batch_loss
from rlinf_vl.actor.terms import Passes
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.verify.compare.batch_file import batch_from
from rlinf_vl.tools.verify.compare.columns import ORDER, Calculation
from rlinf_vl.tools.verify.compare.main import compare_batch
from rlinf_vl.tools.verify.compare.verdict import first_difference

DUMPS = Path(__file__).parent
SETTINGS = {
    "adv_type": "grpo",
    "loss_agg_func": "token-mean",
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 1.5,
    "kl_beta": 0.05,
    "importance_sampling_fix": True,
    "importance_sampling_clip": 2.0,
    "entropy_bonus": 0.003,
    "temperature": 0.7,
    "max_new_tokens": 16,
}
LENGTHS = (6, 3, 9, 5, 7, 2, 4, 8, 3, 5, 6, 4)
REWARDS = (1.0, 0.0, 0.3, 0.0, 0.9, 0.9, 0.9, 0.2, 1.0, 0.0, 0.1, 0.7)


def inputs(**settings):
    """A batch of 12 responses in three groups, one of which ties, with random numbers."""
    generator = torch.Generator().manual_seed(5)

    def random(n, scale=1.0):
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    samples = []
    for index, (n, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        logits = random(n * 11).reshape(n, 11)
        ids = torch.randint(11, (n,), generator=generator)
        logprobs = (logits / 0.7).log_softmax(1).gather(1, ids[:, None]).squeeze(1)
        old = logprobs + random(n, 0.5)
        samples.append(
            {
                "group_id": (0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2)[index],
                "micro_batch": index // 3,
                "response_ids": ids.tolist(),
                "response_mask": [int(i != 1 or n < 5) for i in range(n)],
                "reward": reward,
                "logits": logits.tolist(),
                "logprobs": logprobs.tolist(),
                "old_logprobs": old.tolist(),
                "rollout_logprobs": (old + random(n, 0.6)).tolist(),
                "ref_logprobs": (logprobs + random(n, 0.4)).tolist(),
            }
        )
    return {"samples": samples, "settings": SETTINGS | settings}


def recorded(columns, changes=None, switches=None, **settings):
    """The batch with float32 columns of a system that differs by `changes` and `switches`."""
    document = inputs(**settings)
    for name in ORDER:
        batch = batch_from(document)
        algorithm = batch.algorithm
        for key, value in (changes or {}).items():
            section = algorithm.sampling_params if key == "temperature" else algorithm
            setattr(section, key, value)
        if name == "logprobs" and name not in columns:
            continue
        values = Calculation(batch, algorithm, name, switches or {}).value(name).float()
        if name == "loss":
            document["loss"] = values.item()
            continue
        for index, sample in enumerate(document["samples"]):
            of_tokens = values.shape == batch.mask.shape
            sample[name] = (
                values[batch.segment_ids == index].tolist() if of_tokens else values[index].item()
            )
    for sample in document["samples"]:
        for name in set(ORDER) - {*columns, "logprobs", "loss"}:
            sample.pop(name, None)
    return batch_from(document)


def first_of(batch):
    """The first column that differs, and the names of its reasons."""
    first = first_difference(compare_batch(batch))
    assert first is not None
    return first, [[variant.name for variant in reason.variants] for reason in first.reasons]


#: Planted difference → changes of settings, formulas of others, the column that must be named.
PLANTED = {
    "std-population": ({}, {"std": "population"}, "advantages"),
    "no-std": ({"normalize_advantages": False}, {}, "advantages"),
    "std-batch": ({}, {"std": "batch"}, "advantages"),
    "eps": ({}, {"eps": 1e-4}, "advantages"),
    "eps-inside": ({}, {"eps": 1e-3, "eps_place": "inside"}, "advantages"),
    "leave-one-out": ({"adv_type": "rloo"}, {}, "advantages"),
    "tie-noise": ({}, {"ties": "noise"}, "advantages"),
    "kl-in-reward": ({"kl_placement": "reward", "kl_penalty_type": "k1"}, {}, "advantages"),
    "temperature-forgotten": ({"temperature": 1.0}, {}, "logprobs"),
    "ratio-rollout": ({"old_policy": "sampler"}, {"tis_from": "current"}, "ratio"),
    "ratio-sequence-mean": ({}, {"ratio_level": "geometric"}, "ratio"),
    "old-shifted": ({}, {"old_shift": 1}, "ratio"),
    "tis-sequence": ({"importance_sampling_level": "sequence"}, {}, "weights"),
    "tis-geometric": ({"importance_sampling_level": "geometric"}, {}, "weights"),
    "tis-clip": ({"importance_sampling_clip": 1.7}, {}, "weights"),
    "tis-masked": ({}, {"tis_kind": "masked"}, "weights"),
    "clip-high": ({"clip_ratio_high": 0.37}, {}, "policy_loss"),
    "clip-low": ({"clip_ratio_low": 0.1}, {}, "policy_loss"),
    "no-dual-clip": ({"clip_ratio_c": None}, {}, "policy_loss"),
    "loss-cispo": ({"loss_type": "cispo"}, {}, "policy_loss"),
    "policy-sign": ({}, {"policy_sign": -1.0}, "policy_loss"),
    "kl-k1": ({"kl_penalty_type": "k1"}, {}, "kl"),
    "kl-k2": ({"kl_penalty_type": "k2"}, {}, "kl"),
    "kl-reversed": ({}, {"kl_reversed": True}, "kl"),
    "kl-beta": ({"kl_beta": 0.0123}, {}, "token_loss"),
    "no-entropy": ({"entropy_bonus": 0.0}, {}, "token_loss"),
    "entropy-sign": ({"entropy_bonus": -0.003}, {}, "token_loss"),
    "agg-seq-mean-token-mean": ({"loss_agg_func": "seq-mean-token-mean"}, {}, "loss"),
    "agg-seq-mean-token-sum-norm": ({"loss_agg_func": "seq-mean-token-sum-norm"}, {}, "loss"),
    "micro-batch-means": ({}, {"aggregation": "micro:token-mean"}, "loss"),
    "loss-sign": ({}, {"loss_sign": -1.0}, "loss"),
    "mask-shifted": ({}, {"mask": 1}, "loss"),
}
#: Bool columns tell less than the losses of the tokens.
NUMBERS = [name for name in ORDER if name not in ("clipped", "group_mean", "group_std")]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(name):
    changes, switches, column = PLANTED[name]
    columns = [c for c in NUMBERS if c != "logprobs" or column == "logprobs"]
    first, reasons = first_of(recorded(columns, changes, switches))
    assert first.column == column
    assert reasons and reasons[0] == [name], reasons
    assert first.sample is not None or column == "loss"


@pytest.mark.parametrize("name", ["std-population", "kl-k2", "agg-seq-mean-token-sum", "clip-low"])
def test_a_difference_shows_in_the_loss_alone(name):
    changes, switches, _ = PLANTED.get(name) or ({"loss_agg_func": "seq-mean-token-sum"}, {}, "")
    first, reasons = first_of(recorded(["loss"], changes, switches))
    assert first.column == "loss"
    assert [name] in reasons


@pytest.mark.parametrize(
    ("changes", "switches", "named"),
    [
        ({"kl_penalty_type": "k1"}, {"std": "population"}, [("advantages", "std-population"), ("kl", "kl-k1")]),
        (
            {"importance_sampling_level": "sequence", "loss_agg_func": "seq-mean-token-mean"},
            {},
            [("weights", "tis-sequence"), ("loss", "agg-seq-mean-token-mean")],
        ),
        ({"clip_ratio_high": 0.37}, {"eps": 1e-4}, [("advantages", "eps"), ("policy_loss", "clip-high")]),
    ],
)  # fmt: skip
def test_two_differences_are_named_in_their_order(changes, switches, named):
    batch = recorded([c for c in NUMBERS if c != "logprobs"], changes, switches)
    differing = [c for c in compare_batch(batch) if c.state == "differs"]
    assert [c.column for c in differing] == [column for column, _ in named]
    for comparison, (_, name) in zip(differing, named, strict=True):
        assert any(v.name == name for v in comparison.reasons[0].variants)


def test_two_differences_in_one_column_are_named_together():
    switches = {"std": "population", "eps": 1e-4}
    first, reasons = first_of(recorded(["advantages"], {}, switches))
    assert first.column == "advantages"
    assert ["std-population", "eps"] in [sorted(r, reverse=True) for r in reasons]


def test_equal_settings_have_no_difference():
    comparisons = compare_batch(recorded(ORDER))
    assert [c.column for c in comparisons if c.state == "agrees"] == list(ORDER)


def test_a_follower_is_no_difference_of_its_own():
    changes = {"kl_placement": "reward", "kl_penalty_type": "k1"}
    batch = recorded(["advantages", "policy_loss", "token_loss", "loss"], changes)
    states = {c.column: c.state for c in compare_batch(batch)}
    assert (states["advantages"], states["token_loss"]) == ("differs", "follows")


def test_the_loss_is_that_of_the_trainer():
    """Our columns together give what the trainer's own function of a micro-batch gives."""
    document = inputs(temperature=1.0)
    batch = batch_from(document)
    entropy = Calculation(batch, batch.algorithm, "").value("entropy")
    advantages = Calculation(batch, batch.algorithm, "").value("advantages")
    keep = batch.mask

    # The fields of a MicroBatch that the loss reads.
    class Rows:
        trajectories = batch.segment_ids[keep].numpy()
        rollout_logprobs = batch.columns["rollout_logprobs"][keep].float().numpy()
        versions = torch.zeros(int(keep.sum()), dtype=torch.int32).numpy()
        corrupted = None
        columns = {}

    Rows.advantages = advantages[keep].float().numpy()
    loss, _ = micro_batch_loss(
        batch.columns["logprobs"][keep].float(),
        entropy[keep].float(),
        batch.columns["old_logprobs"][keep].float(),
        Passes(reference=batch.columns["ref_logprobs"][keep].float()),
        Rows,
        batch.algorithm,
        int(keep.sum()),
    )
    assert Calculation(batch, batch.algorithm, "").value("loss").item() == pytest.approx(
        loss.item(), rel=1e-5
    )


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_a_true_dump_with_equal_settings_agrees(name, capsys):
    assert main(["compare-batch", str(DUMPS / f"{name}.json")]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "setting", "column", "reason"),
    [
        ("verl", {"kl_penalty_type": "k1"}, "kl", "kl-k3"),
        ("verl", {"importance_sampling_clip": 2.0}, "weights", "tis-clip"),
        ("verl", {"clip_ratio_c": None}, "loss", "dual-clip"),
        ("verl", {"loss_agg_func": "seq-mean-token-mean"}, "loss", "agg-token-mean"),
        ("trl", {"clip_ratio_high": 0.2}, "loss", "clip-high"),
        ("trl", {"adv_type": "grpo"}, "advantages", "no-std"),
    ],
)
def test_a_true_dump_with_another_setting_of_ours_differs(name, setting, column, reason):
    document = json.loads((DUMPS / f"{name}.json").read_text())
    document["settings"] |= setting
    first, reasons = first_of(batch_from(document))
    assert first.column == column
    assert any(reason in names for names in reasons)


def test_the_eps_of_trl_is_named(capsys):
    assert main(["compare-batch", str(DUMPS / "trl_defaults.json"), "--json"]) == 1
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["first_difference"] == "advantages"
    states = {column["column"]: column for column in outcome["columns"]}
    reason = states["advantages"]["reasons"][0]
    assert reason["names"] == ["eps"] and "0.0001" in reason["text"]
    assert reason["setting"] is None
    # TRL's default weighs the KL by the ratio, too (`use_bias_correction_kl`).
    assert states["loss"]["reasons"][0]["names"] == ["kl-weighted"]


def test_parquet_is_read_as_json_is(tmp_path, capsys):
    document = json.loads((DUMPS / "verl.json").read_text())
    table = pa.Table.from_pylist(document.pop("samples"))
    table = table.replace_schema_metadata({"rlinf_vl_batch": json.dumps(document)})
    pq.write_table(table, tmp_path / "batch.parquet")
    assert main(["compare-batch", str(tmp_path / "batch.parquet")]) == 0


@pytest.mark.slow
def test_bfloat16_has_its_own_tolerance():
    document = json.loads((DUMPS / "verl.json").read_text())
    for sample in document["samples"]:
        values = torch.tensor(sample["advantages"]).bfloat16()
        sample["advantages"] = values.float().tolist()
    assert first_difference(compare_batch(batch_from(document))).column == "advantages"
    comparisons = compare_batch(batch_from(document | {"dtype": "bfloat16"}))
    assert first_difference(comparisons) is None


def test_rewards_of_another_grader_are_named():
    document = inputs()
    texts = [("\\boxed{4}", "4", 1.0), ("it is 4", "4", 0.0), ("\\boxed{3}", "4", 0.0)]
    for index, sample in enumerate(document["samples"]):
        response, answer, reward = texts[index % 3]
        sample |= {"response": response, "answer": answer, "reward": reward}
    document["grader"] = "math"
    agreeing = compare_batch(batch_from(copy.deepcopy(document)))
    assert next(c for c in agreeing if c.column == "reward").state == "agrees"
    for index, sample in enumerate(document["samples"]):
        sample["reward"] = float(index % 3 < 2)
    first, reasons = first_of(batch_from(document))
    assert (first.column, reasons[0]) == ("reward", ["grader-contains"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tokenizer of words with a chat template."""
    words = "<eos> <s> <user> <assistant> <unk> how many cells be brief".split()
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}<user> {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([2, 8, 9, 2, 5, 6, 7, 3], None),
        ([2, 8, 9, 2, 5, 6, 7], "no-generation-prompt"),
        ([2, 5, 6, 7, 3], "no-system"),
    ],
)
def test_prompts_are_compared_with_the_template(checkpoint, ids, reason):
    document = inputs() | {"model": checkpoint}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how many cells"},
    ]
    for sample in document["samples"]:
        sample |= {"prompt_ids": ids, "messages": messages}
    prompts = compare_batch(batch_from(document))[0]
    assert (prompts.column, prompts.state) == ("prompt_ids", "differs" if reason else "agrees")
    if reason:
        assert [r.variants[0].name for r in prompts.reasons] == [reason]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["samples"][2]["logprobs"].pop(), r"samples\[2\].logprobs has shape \[8\].*\[9\]"),
        (lambda d: d["samples"][1].pop("reward"), r"samples\[1\].reward is missing"),
        (lambda d: d["samples"][0].update(old_logprob=[1]), "did you mean 'old_logprobs'"),
        (lambda d: d["settings"].update(clip_ratio=0.2), r"settings.clip_ratio: is none of"),
        (lambda d: d["settings"].update(kl_beta=-1), "settings.kl_beta: -1 must be >= 0"),
        (lambda d: d["samples"][0]["logprobs"].__setitem__(1, float("nan")), "value 1 is nan"),
        (lambda d: d["samples"].clear(), "samples is empty"),
        (lambda d: d.update(dtype="fp8"), "dtype is 'fp8'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told_where(change, message):
    document = inputs()
    change(document)
    with pytest.raises(ConfigError, match=message):
        batch_from(document)


def test_a_column_that_can_not_be_computed_says_what_is_missing():
    document = inputs()
    document["loss"] = 0.5
    for sample in document["samples"]:
        del sample["logits"]
    loss = compare_batch(batch_from(document))[-1]
    assert (loss.state, loss.note) == ("not compared", "no entropy")


def test_a_file_that_is_none(tmp_path, capsys):
    assert main(["compare-batch", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
