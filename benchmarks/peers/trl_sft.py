"""Supervised steps of TRL's SFTTrainer on CPU, on given conversations with pictures.

    PEER_PYTHON benchmarks/peers/trl_sft.py WORKDIR

WORKDIR holds model/ (a Qwen3-VL checkpoint with tokenizer and processor files), rows.json and the images that it names:

    {"rows": [{"image": "images/0.png", "text": "…", "answer": "…"}, …], "batch": 16, "micro_batch": 4, "threads": 2, "steps": 3}

`micro_batch` divides `batch`; the rows are `steps` + 1 batches, in order. WORKDIR/peer.json gets, after a warm-up step,
`step_seconds` and `step_cpu_seconds` (each, with loading, processing and padding), `losses`, and the tokens of a step
(`sequence_tokens`, `padded_tokens`, `loss_tokens`). TRL's answers end with a line break behind the stop token, which carries
loss, too.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
    import trl
    from datasets import Dataset, Image, Sequence
    from transformers import AutoProcessor, PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    command = "pip install --no-deps 'trl==1.16.*' 'accelerate==1.15.*'"
    sys.exit(
        f"{error}. Into the interpreter that runs this file (datasets >= 4.7 too, where missing): {command}"
    )


class Clock(TrainerCallback):
    """Seconds of each step, from the end of the one before, and the losses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.losses: list[float] = []
        self.restart()

    def restart(self) -> None:
        self.last, self.cpu_last = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.last)
        self.cpu_seconds.append(time.process_time() - self.cpu_last)
        self.restart()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    rows = [
        {
            "prompt": [{"role": "user", "content": row["text"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
            "images": [str(folder / row["image"])],
        }
        for row in spec["rows"]
    ]
    clock = Clock()
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=spec["batch"] // spec["micro_batch"],
        max_length=None,
        completion_only_loss=True,
        gradient_checkpointing=False,
        optim="adamw_torch",
        learning_rate=1e-6,
        max_steps=spec["steps"] + 1,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=str(folder / "model"),
        args=config,
        processing_class=AutoProcessor.from_pretrained(folder / "model"),
        train_dataset=Dataset.from_list(rows).cast_column("images", Sequence(Image())),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.model.model.visual.requires_grad_(False)
    tokens = {"sequence": 0, "padded": 0, "loss": 0}
    collate = trainer.data_collator

    def counted(examples):
        batch = collate(examples)
        tokens["sequence"] += int(batch["attention_mask"].sum())
        tokens["padded"] += batch["attention_mask"].numel()
        tokens["loss"] += int((batch["labels"] != -100).sum())
        return batch

    trainer.data_collator = counted
    clock.restart()
    trainer.train()
    result = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "step_seconds": clock.seconds[1:],
        "step_cpu_seconds": clock.cpu_seconds[1:],
        "losses": clock.losses,
        **{f"{name}_tokens": count / (spec["steps"] + 1) for name, count in tokens.items()},
    }
    (folder / "peer.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
