"""One GRPO optimizer step of TRL's GRPOTrainer on CPU, with given prompts, images and completion lengths, timed by part.

    PEER_PYTHON benchmarks/peers/trl_step.py WORKDIR

WORKDIR holds model/ (a Qwen3-VL checkpoint with tokenizer and processor files), rows.json and the images that it names:

    {"groups": [{"image": "images/0.png", "text": "…", "lengths": [17, 240, …]}, …], "samples": 8, "threads": 2,
     "steps": 3, "micro_groups": 1, "beta": 0.04, "dtype": "float32", "freeze_vision": false, "generate": true,
     "compact_head": false}

Every group has `samples` lengths; `micro_groups` divides the number of groups; all groups make one optimizer step. The last
three keys may be left out. "generate": false hands over random ids of the same lengths, to time training alone
(`generate_seconds`, `step_seconds` are null); "compact_head": true projects only completions to the vocabulary, as TRL does on
GPUs (on CPU it scores prompts too). WORKDIR/peer.json gets medians after a warm-up step:

- `train_seconds`: the step less generation, processing and data. The reference pass (`reference_seconds` of it), forward,
  backward, clipping, AdamW, and TRL's bookkeeping. TRL makes no pass for old log-probabilities in this setting.
- `generate_seconds`: transformers' `generate`, all rows in one batch until the longest has ended (vision tower included).
- `process_seconds`: the processor's tokens and pixels (twice a step). `data_seconds`: the loader, which decodes the images.
- `step_seconds`: all of it. Loading the model and building the trainer are not timed.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch
    import transformers
    import trl
    import trl.trainer.utils as trl_utils
    from datasets import Dataset, Image
    from transformers import (
        AutoProcessor,
        LogitsProcessor,
        LogitsProcessorList,
        PrinterCallback,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    command = "pip install --no-deps 'trl==1.16.*' 'accelerate==1.15.*'"
    sys.exit(
        f"{error}. Into the interpreter that runs this file (datasets >= 4.7 too, where missing): {command}"
    )


class Clock(TrainerCallback):
    """Seconds by part of the current step; `steps` keeps the finished ones, one printed line each."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.start()

    def start(self) -> None:
        self.parts, self.started = defaultdict(float), time.perf_counter()

    @contextmanager
    def part(self, name: str):
        start = time.perf_counter()
        yield
        self.parts[name] += time.perf_counter() - start

    def on_step_end(self, args, state, control, **kwargs) -> None:
        step = {name: self.parts[name] for name in ("generate", "process", "data", "reference")}
        step["step"] = time.perf_counter() - self.started
        step["train"] = step["step"] - step["generate"] - step["process"] - step["data"]
        self.steps.append(step)
        parts = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in step.items())
        print(
            f"step {len(self.steps) - 1}{' (warm-up)' if len(self.steps) == 1 else ''}: {parts}",
            flush=True,
        )


class ExactLengths(LogitsProcessor):
    """Row i ends with EOS as its `lengths[i]`-th new token, and not before."""

    def __init__(self, prompt: int, lengths: list[int], eos: list[int]) -> None:
        self.prompt, self.lengths, self.eos = prompt, torch.tensor(lengths), eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.prompt + 1
        scores[last] = -torch.inf
        scores[last, self.eos[0]] = 0.0
        return scores


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock, and with completions of the lengths that each row of the data set asks for."""

    def __init__(self, clock: Clock, real: bool, **arguments) -> None:
        super().__init__(**arguments)
        self.clock, self.lengths, self.tokens = clock, [], {}
        generate = self.model.generate

        def timed_generate(input_ids, **inputs):
            exact = ExactLengths(input_ids.shape[1], self.lengths, self.eos_token_ids)
            with clock.part("generate"):
                if real:
                    return generate(
                        input_ids=input_ids, **inputs, logits_processor=LogitsProcessorList([exact])
                    )
                ids = torch.randint(
                    min(self._tokenizer.all_special_ids), (len(self.lengths), max(self.lengths))
                )
                ids[torch.arange(len(ids)), exact.lengths - 1] = self.eos_token_ids[0]
                return torch.cat([input_ids, ids], 1)

        self.model.generate = timed_generate

    def get_batch_samples(self, *args, **kwargs):
        self.clock.start()  # transformers' training loop begins every optimizer step with this call
        with self.clock.part("data"):
            return super().get_batch_samples(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        with self.clock.part("reference" if model is self.ref_model else "policy"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.lengths = [row["lengths"][i % self.num_generations] for i, row in enumerate(inputs)]
        batch = super()._generate_and_score_completions(inputs)
        got = batch["completion_mask"].sum(1).tolist()
        if got != self.lengths:
            sys.exit(f"completion lengths differ from those asked for:\n{got}\n{self.lengths}")
        if "ref_per_token_logps" not in batch or "old_per_token_logps" in batch:
            sys.exit(
                "this step is not the one described: no reference pass, or a pass for old log-probabilities"
            )
        masks = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        self.tokens = {"response": sum(got), "sequence": int(masks.sum()), "padded": masks.numel()}
        return batch


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    groups, samples, micro, steps = (
        spec[key] for key in ("groups", "samples", "micro_groups", "steps")
    )
    real = spec.get("generate", True)
    if (
        spec["dtype"] != "float32"
        or len(groups) % micro
        or any(len(g["lengths"]) != samples for g in groups)
    ):
        sys.exit(
            "rows.json: dtype is float32, micro_groups divides the groups, each group has `samples` lengths"
        )
    torch.set_num_threads(spec["threads"])
    if spec.get("compact_head"):
        # Read by the LM head only; the kernels have their own.
        trl_utils._use_triton = lambda device: True
    rows = [
        {
            "prompt": [{"role": "user", "content": g["text"]}],
            "image": str(folder / g["image"]),
            "lengths": g["lengths"],
        }
        for g in groups
    ]
    clock = Clock()
    processor = AutoProcessor.from_pretrained(folder / "model", padding_side="left")
    process = type(processor).__call__

    def timed_process(self, *args, **kwargs):
        with clock.part("process"):
            return process(self, *args, **kwargs)

    type(processor).__call__ = timed_process
    # TRL pads all rows to the step's longest prompt and longest completion before it cuts device batches, so that a smaller
    # `micro_groups` saves no padding. Its defaults are one iteration and temperature 1.
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": spec["dtype"], "attn_implementation": "sdpa"},
        per_device_train_batch_size=micro * samples,
        gradient_accumulation_steps=len(groups) // micro,
        num_generations=samples,
        max_completion_length=max(max(g["lengths"]) for g in groups),
        beta=spec["beta"],
        shuffle_dataset=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
        max_steps=steps + 1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = TimedTrainer(
        clock,
        real,
        model=str(folder / "model"),
        args=config,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        processing_class=processor,
        train_dataset=Dataset.from_list(rows * (steps + 1)).cast_column("image", Image()),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    if spec.get("freeze_vision"):
        trainer.model.model.visual.requires_grad_(False)
    trainer.train()
    result = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{
            f"{name}_seconds": statistics.median(s[name] for s in clock.steps[1:])
            for name in clock.steps[0]
        },
        **({} if real else {"generate_seconds": None, "step_seconds": None}),
        "completion_lengths_exact": True,
        **{f"{name}_tokens": count for name, count in trainer.tokens.items()},
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    (folder / "peer.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
