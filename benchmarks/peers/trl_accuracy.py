"""TRL's GRPOTrainer on CPU until held-out accuracy reaches a target, on the clock of its training alone.

    PEER_PYTHON benchmarks/peers/trl_accuracy.py WORKDIR

`benchmarks/time_to_accuracy.py` writes WORKDIR/spec.json and runs this with an interpreter that has trl 1.16, torchvision and this
package's own requirements (as `benchmarks/peers/trl_step.py`). WORKDIR/peer.jsonl gets a line per evaluation:
{"step", "seconds", "accuracy"}, seconds of training up to there: data, generation, rewards, update and TRL's bookkeeping, not the
evaluations, nor loading the model and building the trainer.
"""

import base64
import io
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset, Image
from PIL import Image as Pictures
from transformers import AutoProcessor, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlinf_vl.rewards import grade_math


def prompt_of(row: dict) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["text"]}]}]


def picture_of(row: dict) -> Pictures.Image:
    return Pictures.open(io.BytesIO(base64.b64decode(row["image"]))).convert("RGB")


class Evaluation(TrainerCallback):
    """Stops the clock every `interval` steps to sample an answer to each held-out row, and training at the target."""

    def __init__(self, spec: dict, processor, output: Path) -> None:
        self.spec, self.output, self.trainer = spec, output, None
        rows = spec["val"]
        texts = [
            processor.apply_chat_template(prompt_of(r), add_generation_prompt=True, tokenize=False)
            for r in rows
        ]
        self.inputs = processor(
            text=texts, images=[picture_of(r) for r in rows], padding=True, return_tensors="pt"
        )
        self.inputs.pop("token_type_ids", None)
        for ids, mask, row in zip(
            self.inputs["input_ids"], self.inputs["attention_mask"], rows, strict=True
        ):
            if ids[mask.bool()].tolist() != row["ids"]:
                sys.exit(
                    f"the processor makes another prompt of {row['text']!r} than the one described"
                )
        self.processor, self.paused, self.started = processor, 0.0, 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step % self.spec["interval"]:
            return
        now = time.perf_counter()
        accuracy = self.accuracy(kwargs["model"])
        line = {
            "step": state.global_step,
            "seconds": now - self.started - self.paused,
            "accuracy": accuracy,
        }
        with self.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        control.should_training_stop = accuracy >= self.spec["target"]
        self.paused += time.perf_counter() - now

    def accuracy(self, model) -> float:
        rows, right = self.spec["val"], 0
        state = torch.get_rng_state()  # training draws what it would draw without evaluations
        model.eval()
        with torch.no_grad():
            for _ in range(self.spec["val_samples"]):
                out = model.generate(
                    **self.inputs, max_new_tokens=self.spec["max_new_tokens"], do_sample=True
                )
                said = self.processor.batch_decode(
                    out[:, self.inputs["input_ids"].shape[1] :], skip_special_tokens=True
                )
                right += sum(
                    grade_math(text, row["answer"]) for text, row in zip(said, rows, strict=True)
                )
        model.train()
        torch.set_rng_state(state)
        return right / (len(rows) * self.spec["val_samples"])


def reward(completions, answer, **_) -> list[float]:
    return [float(grade_math(c[0]["content"], a)) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    processor = AutoProcessor.from_pretrained(spec["model"], padding_side="left")
    evaluation = Evaluation(spec, processor, folder / "peer.jsonl")
    rows = [
        {
            "prompt": [{"role": "user", "content": r["text"]}],
            "answer": r["answer"],
            "image": picture_of(r),
        }
        for r in spec["train"]
    ]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        per_device_train_batch_size=spec["problems"] * spec["samples"],
        num_generations=spec["samples"],
        max_completion_length=spec["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, as `token-mean`
        scale_rewards="group",
        learning_rate=spec["lr"],
        lr_scheduler_type="linear",
        warmup_steps=spec["warmup"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        max_steps=spec["steps"],
        seed=spec["seed"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=spec["model"],
        args=config,
        reward_funcs=reward,
        processing_class=processor,
        train_dataset=Dataset.from_list(rows).cast_column("image", Image()),
        callbacks=[evaluation],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model.model.visual.requires_grad_(False)
    trainer.train()


if __name__ == "__main__":
    main()
