"""A run whose trajectories are conversations, for tests of what shows them: mazes with a picture a turn, and a tool."""

import hashlib
import io
import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def make_conversations(folder: Path, steps: int = 6, groups: int = 2, samples: int = 4) -> Path:
    """A run's folder: mazes (a picture every turn, more of them solved in later steps) and drawings measured by a tool."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "trajectories").mkdir()
    lines = []
    for step in range(steps + 1):
        rows = []
        for split in ("val",) * (step % 3 == 0) + ("train",) * (step > 0):
            for g in range(groups * (3 if split == "val" else 1)):
                play = _maze if g % 2 == 0 else _measured
                for sample in range(1 if split == "val" else samples):
                    told = play(rng, folder, step / max(1, steps), g)
                    rows.append(_row(rng, step, split, g, sample, *told))
        pq.write_table(pa.Table.from_pylist(rows), folder / f"trajectories/step_{step}.parquet")
        metrics = {
            "step": step,
            "time/step": 2.0,
            "reward/mean": 0.2 + 0.1 * step,
            "rollout/turns_mean": 5 - 0.3 * step,
        }
        metrics |= {"rollout/turns_max": 6, "env/distance_left": 3 - 0.4 * step}
        if step % 3 == 0:
            metrics |= {"val/accuracy": 0.2 + 0.1 * step, "val/env/distance_left": 3 - 0.5 * step}
        lines.append(json.dumps(metrics))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"runner:\n  experiment_name: {folder.name}\n  max_steps: {steps}\n"
    )
    return folder


def _store(folder: Path, image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    name = f"images/{hashlib.sha256(data.getvalue()).hexdigest()}.png"
    (folder / name).write_bytes(data.getvalue())
    return name


def _maze(rng, folder: Path, skill: float, problem: int):
    """(what was said and answered, images, answer): [[messages before the answer, answer, facts of the turn], …]."""
    agent, goal = [int(rng.integers(0, 2)), int(rng.integers(0, 2))], (3, 3)
    images, turns = [], []
    for turn in range(6):
        picture = Image.new("RGB", (32, 32), "#f7f5ee")
        draw = ImageDraw.Draw(picture)
        for x, y, color in (
            (1, 2, "#454b54"),
            (2, 0, "#454b54"),
            (*goal, "#26734d"),
            (*agent, "#b3261e"),
        ):
            draw.rectangle([8 * x, 8 * y, 8 * x + 7, 8 * y + 7], fill=color)
        images.append(_store(folder, picture))
        asked = [
            "Which way to the green cell? ",
            turn,
            "\nAnswer with \\boxed{up}, down, left or right.",
        ]
        wanted = "right" if agent[0] < goal[0] else "down"
        move = wanted if rng.random() < 0.3 + 0.7 * skill else str(rng.choice(list(MOVES)))
        agent = [min(3, max(0, a + d)) for a, d in zip(agent, MOVES[move], strict=True)]
        done = tuple(agent) == goal
        facts = {"reward": float(done), "state": f"{agent[0]}{agent[1]}"}
        said = [{"role": "user", "content": asked if turn == 0 else [turn]}]
        turns.append((said, f"{agent[0]}{agent[1]}>33 \\boxed{{{move}}}<|im_end|>", facts))
        if done:
            break
    return turns, images, "33"


def _measured(rng, folder: Path, skill: float, problem: int):
    image = Image.new("RGB", (320, 200), "#f4f1e8")
    wide, high = int(rng.integers(2, 9)), int(rng.integers(2, 5))
    ImageDraw.Draw(image).rectangle(
        [20, 20, 20 + 30 * wide, 20 + 30 * high], outline="#1a5fb4", width=4
    )
    images = [_store(folder, image), _store(folder, image.crop((0, 0, 160, 100)))]
    system = {"role": "system", "content": ["You may call tools. Answer in \\boxed{}."]}
    asked = {"role": "user", "content": [0, "What is the area of this rectangle, in squares?"]}
    zoom = {"name": "zoom", "arguments": {"box": [0, 0, 160, 100]}}
    broken = {
        "name": "multiply",
        "arguments": '{"a": ' + str(wide),
        "error": "the arguments are no JSON object",
    }
    call = {"name": "multiply", "arguments": {"a": wide, "b": high}}
    text = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call><|im_end|>'
    turns = [
        (
            [system, asked],
            "Let me look closer.\n" + text.format("zoom", json.dumps(zoom["arguments"])),
            [zoom],
        ),
        (
            [{"role": "tool", "content": ["Enlarged: ", 1]}],
            text.format("multiply", broken["arguments"]),
            [broken],
        ),
        (
            [{"role": "tool", "content": [broken["error"]]}],
            text.format("multiply", json.dumps(call["arguments"])),
            [call],
        ),
        (
            [{"role": "tool", "content": [str(wide * high)]}],
            f"\\boxed{{{wide * high}}}<|im_end|>",
            [],
        ),
    ]
    told = [(said, answer, {"reward": 0.0, "tool_calls": calls}) for said, answer, calls in turns]
    told[-1][2]["reward"] = 1.0
    return told, images, str(wide * high)


def _row(rng, step: int, split: str, group: int, sample: int, told, images, answer: str) -> dict:
    tokens, mask, turns, messages = [], [], [], []
    for said, response, facts in told:
        for part in (part for m in said for part in m["content"] if turns):
            tokens += [part] if isinstance(part, str) else ["<|image_pad|>"] * 4
        sampled = [response[k : k + 4] for k in range(0, len(response), 4)]
        start = len(tokens)
        tokens += sampled
        mask += [False] * (start - len(mask)) + [True] * len(sampled)
        own = {"start": start, "end": len(tokens), "finish_reason": "stop"}
        advantage = {"advantage": float(rng.normal())} if split == "train" else {}
        messages += [*said, {"role": "assistant", "content": [], "turn": len(turns)}]
        turns.append(facts | own | advantage)
    reward, n = sum(turn["reward"] for turn in turns), len(tokens)
    rollout = np.where(mask, -rng.exponential(0.3, n), 0.0)
    return {
        "step": step,
        "split": split,
        "group_id": f"{split}-{step}-{group}",
        "problem_id": f"{'maze' if group % 2 == 0 else 'drawing'}-{group}",
        "sample": sample,
        "prompt": "<|im_start|>user\n<image>What now?<|im_end|>\n<|im_start|>assistant\n",
        "response": "".join(tokens),
        "answer": answer,
        "images": images,
        "tokens": tokens,
        "response_ids": [zlib.crc32(token.encode()) % 500 for token in tokens],
        "response_mask": mask,
        "rollout_logprobs": rollout.tolist(),
        "train_logprobs": (rollout + np.where(mask, rng.normal(0, 0.02, n), np.nan)).tolist()
        if split == "train"
        else None,
        "turns": json.dumps({"sequences": [0], "turns": turns}),
        "messages": json.dumps([messages]),
        "advantage": float(rng.normal()) if split == "train" else None,
        "reward": reward,
        "reward_parts": json.dumps({"goal": reward}),
        "metrics": json.dumps({"distance left": float(rng.integers(0, 4))}),
        "correct": reward > 0,
        "error": None,
        "finish_reason": "stop",
        "weight_versions": [max(0, step - 1) if m else -1 for m in mask],
    }
