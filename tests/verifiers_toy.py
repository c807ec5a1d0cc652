"""Environments of `verifiers` for tests: the toy's questions with their pictures, and some that are refused.

`load_environment` is what an installed environment's package has.
"""

import base64
import itertools

import verifiers as vf
from datasets import Dataset

from rlinf_vl.data.sources import open_source

_numbers = itertools.count()


def prompt_of(row) -> list[dict]:
    picture = base64.b64encode(row["images"][0]["bytes"]).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    question = row["problem"].removeprefix("<image>")
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def questions(split: str, n: int) -> Dataset:
    source = open_source("toy", split)
    rows = [source.row(number, ["problem", "images", "answer"]) for number in range(n)]
    answers = [vf.extract_boxed_answer(row["answer"]) for row in rows]
    return Dataset.from_dict({"prompt": [prompt_of(row) for row in rows], "answer": answers})


def text_of(completion) -> str:
    return "\n".join(message["content"] for message in completion if message["role"] == "assistant")


def right(completion, answer) -> float:
    """1 for the boxed answer of the last try."""
    last = [message["content"] for message in completion if message["role"] == "assistant"][-1]
    return float(vf.extract_boxed_answer(last) == answer)


def brief(completion) -> float:
    return 1 / (1 + len(text_of(completion)))


def compared(completions) -> list[float]:
    return [0.0 for _ in completions]


class SecondTry(vf.MultiTurnEnv):
    """A wrong answer may be mended once."""

    async def env_response(self, messages, state, **kwargs):
        said = [message["content"] for message in messages if message["role"] == "assistant"][-1]
        if vf.extract_boxed_answer(said or "") == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "No. Look again."}]


def load_environment(rows: int = 32, tries: int = 1, kind: str = "plain") -> vf.Environment:
    if kind == "broken":
        raise KeyError("a file that is missing")
    if kind == "unstable":  # other rows at each call
        number = next(_numbers)
        data = Dataset.from_dict({"question": [f"{number}?"] * rows, "answer": ["1"] * rows})
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[right]))
    if kind == "phrases":  # no answers of a kind that a reward function of ours takes
        data = Dataset.from_dict({"question": ["Say it."] * rows, "answer": ["\\boxed{"] * rows})
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[right]))
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.25])
    if kind == "groups":
        rubric.add_reward_func(compared)
    data = {"dataset": questions("train", rows), "eval_dataset": questions("val", 8)}
    if tries == 1:
        return vf.SingleTurnEnv(**data, rubric=rubric)
    return SecondTry(**data, rubric=rubric, max_turns=tries)
