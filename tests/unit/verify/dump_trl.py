"""Writes batches that TRL's own GRPOTrainer trained on: `python dump_trl.py FOLDER_OF_TRL OUTPUT_FOLDER`.

TRL is not in our environment: `pip install --target FOLDER_OF_TRL --no-deps 'trl==1.16.*'` first. A
random text model of 16 KB answers a prompt; the second update on the same answers is recorded, whose
ratio is not 1.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, sys.argv[1])
output_folder = Path(sys.argv[2])

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl import __version__ as trl_version  # noqa: E402

WORDS = [f"w{i}" for i in range(28)]


class Recorder(GRPOTrainer):
    """Records the inputs and the loss of each update."""

    batches: list

    def _calculate_rewards(self, *args):
        self.scores = super()._calculate_rewards(*args)
        return self.scores

    def _get_per_token_logps_and_entropies(self, *args, **options):
        result = super()._get_per_token_logps_and_entropies(*args, **options)
        self.current = result[0].detach()
        return result

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        columns = {
            "logprobs": self.current,
            "old_logprobs": inputs.get("old_per_token_logps"),
            "ref_logprobs": inputs.get("ref_per_token_logps"),
        }
        samples = []
        for i, mask in enumerate(inputs["completion_mask"].bool()):
            sample = {
                "response_ids": inputs["completion_ids"][i][mask].tolist(),
                "group_id": inputs["prompt_ids"][i].tolist().__repr__(),
                "reward": inputs["reward_of_sample"][i].item(),
                "advantages": inputs["advantages"][i].item(),
            }
            for name, values in columns.items():
                if values is not None:
                    sample[name] = values[i][mask].tolist()
            samples.append(sample)
        self.batches.append((samples, loss.item()))
        return loss

    def _generate_and_score_completions(self, inputs):
        # The trainer shuffles what this returns; a column more is shuffled along.
        outputs = super()._generate_and_score_completions(inputs)
        outputs["reward_of_sample"] = self.scores.sum(1)
        return outputs


def tokenizer():
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def reward(completions, **_):
    return [round(sum(len(w) for w in text.split()) * 0.07 % 1, 2) for text in completions]


def record(name, settings, **options):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "w1 w2 w3"}, {"prompt": "w4 w5"}])
    with tempfile.TemporaryDirectory() as folder:
        # The reference model is loaded once more, from the same folder.
        model.save_pretrained(f"{folder}/model")
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, max_steps=2, num_iterations=2, num_generations=4,
            per_device_train_batch_size=8, gradient_accumulation_steps=1, learning_rate=0.05,
            max_completion_length=6, report_to=[], save_strategy="no", seed=3,
            bf16=False, gradient_checkpointing=False, **options,
        )  # fmt: skip
        trainer = Recorder(f"{folder}/model", reward, config, rows, processing_class=tokenizer())
        trainer.batches = []
        trainer.train()
    samples, loss = trainer.batches[-1]
    document = {
        "schema": "rlinf-vl-batch/1",
        "system": f"TRL {trl_version}",
        "settings": settings,
        "samples": samples,
        "loss": loss,
    }
    (output_folder / name).write_text(json.dumps(document))


equal = {
    "adv_type": "dr_grpo", "loss_agg_func": "token-mean", "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28, "kl_beta": 0.04, "kl_penalty_type": "k3",
}  # fmt: skip
clip = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.04}
# With `use_bias_correction_kl`, its default, the KL is multiplied by the ratio.
record(
    "trl.json", equal, loss_type="bnpo", scale_rewards="none", use_bias_correction_kl=False, **clip
)
scaled = equal | {"adv_type": "grpo", "loss_agg_func": "seq-mean-token-mean"}
record("trl_defaults.json", scaled, loss_type="grpo", **clip)
