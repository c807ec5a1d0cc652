"""Columns that are no arithmetic: the ids of prompts, and rewards by a grader."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlinf_vl.errors import ConfigError
from rlinf_vl.rewards.grading import grade
from rlinf_vl.rewards.named import NAMED
from rlinf_vl.tools.verify.compare.batch_file import Batch
from rlinf_vl.tools.verify.compare.variants import Variant
from rlinf_vl.tools.verify.compare.verdict import Comparison, Reason
from rlinf_vl.user_code import CodeError

#: Rewards are sums of few terms; what float32 rounds of them.
REWARD_TOLERANCE = 1e-5


def compare_prompts(batch: Batch) -> Comparison:
    """Compare the recorded prompt ids with the chat template's of the file's `model`."""
    column = "prompt_ids"
    rows = [row for row in batch.samples if "prompt_ids" in row]
    if not rows:
        return Comparison(column, "not compared", "not in the file")
    numbers = [
        n for n, row in enumerate(batch.samples) if "prompt_ids" in row and "messages" in row
    ]
    if batch.model is None or not numbers:
        return Comparison(column, "not compared", "no model, or no messages")
    tokenizer, image_id = _tokenizer(batch.model)
    theirs = [batch.samples[n]["prompt_ids"] for n in numbers]
    messages = [batch.samples[n]["messages"] for n in numbers]

    def ours(render: Callable[[Any, Any], Sequence[int]]) -> list[list[int]]:
        return [_without_repeats(list(render(tokenizer, turn)), image_id) for turn in messages]

    recorded = [_without_repeats(list(ids), image_id) for ids in theirs]
    mine = ours(_rendered)
    differing = [i for i, (a, b) in enumerate(zip(recorded, mine, strict=True)) if a != b]
    if not differing:
        return Comparison(column, "agrees", n_values=len(numbers))
    place = differing[0]
    token = next(
        (i for i, (a, b) in enumerate(zip(recorded[place], mine[place], strict=False)) if a != b),
        min(len(recorded[place]), len(mine[place])),
    )
    comparison = Comparison(
        column,
        "differs",
        sample=numbers[place],
        token=token,
        theirs=recorded[place][token : token + 4],
        ours=mine[place][token : token + 4],
        n_differing=len(differing),
        n_values=len(numbers),
    )
    for name, text, render in _prompt_variants():
        if ours(render) == recorded:
            variant = Variant(name, column, text)
            comparison.reasons.append(Reason((variant,), 0.0))
    return comparison


def _tokenizer(model: str) -> tuple[Any, int | None]:
    """Return the tokenizer of a checkpoint and the id that stands for a piece of an image."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {model!r} has no tokenizer that can be loaded ({error}); name a checkpoint's "
            "folder, or leave model out to compare no prompts"
        ) from error
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return tokenizer, None
    return tokenizer, getattr(config, "image_token_id", None)


def _rendered(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, "tokenize": False} | options
    text = tokenizer.apply_chat_template(messages, **options)
    return tokenizer(text, add_special_tokens=False).input_ids


def _prompt_variants() -> Iterator[tuple[str, str, Callable[[Any, Any], Sequence[int]]]]:
    """Yield name, text and rendering of the known ways to make a prompt differently."""

    def raw(tokenizer: Any, messages: Any) -> list[int]:
        contents = [m["content"] for m in messages if isinstance(m["content"], str)]
        return tokenizer("\n".join(contents), add_special_tokens=False).input_ids

    def without_system(tokenizer: Any, messages: Any) -> list[int]:
        return _rendered(tokenizer, [m for m in messages if m["role"] != "system"])

    yield (
        "no-generation-prompt",
        "end the prompt before the assistant's opening (add_generation_prompt=False)",
        lambda tokenizer, messages: _rendered(tokenizer, messages, add_generation_prompt=False),
    )
    yield (
        "special-twice",
        "add the tokenizer's special tokens to the template's",
        lambda tokenizer, messages: (
            tokenizer(_text(tokenizer, messages), add_special_tokens=True).input_ids
        ),
    )
    yield (
        "thinking-off",
        "render the template with enable_thinking=False",
        lambda tokenizer, messages: _rendered(tokenizer, messages, enable_thinking=False),
    )
    yield "no-template", "use no chat template", raw
    yield "no-system", "leave the system message out", without_system


def _text(tokenizer: Any, messages: Any) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def _without_repeats(ids: list[int], image_id: int | None) -> list[int]:
    """Return ids with each run of image tokens as one: their number is the processor's."""
    shortened = []
    for index, token in enumerate(ids):
        if token != image_id or not index or ids[index - 1] != image_id:
            shortened.append(token)
    return shortened


def compare_rewards(batch: Batch) -> Comparison:
    """Compare the recorded rewards with those of the file's `grader`."""
    column = "reward"
    if column not in batch.columns:
        return Comparison(column, "not compared", "not in the file")
    if batch.grader is None or not all("response" in s and "answer" in s for s in batch.samples):
        return Comparison(column, "not compared", "no grader, or no response and answer")
    theirs = batch.columns[column].tolist()
    try:
        ours = _scores(batch, batch.grader)
    except (CodeError, ValueError) as error:
        raise ConfigError(f"grader: {batch.grader!r} can't grade this file: {error}") from error
    differences = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
    place = max(range(len(theirs)), key=differences.__getitem__)
    comparison = Comparison(
        column,
        "differs" if differences[place] > REWARD_TOLERANCE else "agrees",
        difference=differences[place],
        tolerance=REWARD_TOLERANCE,
        sample=place,
        theirs=theirs[place],
        ours=ours[place],
        n_differing=sum(d > REWARD_TOLERANCE for d in differences),
        n_values=len(theirs),
    )
    if comparison.state == "differs":
        for variant, values in _reward_variants(batch, ours):
            residual = max(abs(a - b) for a, b in zip(theirs, values, strict=True))
            if residual <= REWARD_TOLERANCE:
                comparison.reasons.append(Reason((variant,), residual / REWARD_TOLERANCE))
    return comparison


def _scores(batch: Batch, grader: str) -> list[float]:
    scores = []
    for sample in batch.samples:
        scores.append(grade(grader, sample["response"], sample["answer"]))
    return scores


def _reward_variants(batch: Batch, ours: list[float]) -> Iterator[tuple[Variant, list[float]]]:
    """Yield known ways to reward differently, each with the rewards that it gives."""
    scaled = [2 * score - 1 for score in ours]
    text = "pay -1 for a wrong answer"
    setting = "reward.reward_min_val=-1"
    yield Variant("reward-signed", "reward", text, setting=setting), scaled
    try:
        form = _scores(batch, "format")
    except (CodeError, ValueError):
        form = []
    for weight in (0.1, 0.2, 0.5):
        if form:
            mixed = [(1 - weight) * a + weight * b for a, b in zip(ours, form, strict=True)]
            text = f"pay {1 - weight:g} for the answer and {weight:g} for its format"
            yield Variant("format-part", "reward", text), mixed
            added = [a + weight * b for a, b in zip(ours, form, strict=True)]
            text = f"add {weight:g} for the format"
            yield Variant("format-added", "reward", text), added
    for name, named in NAMED.items():
        if name == batch.grader or not named.judges or name == "judge":
            continue
        try:
            scores = _scores(batch, name)
        except (CodeError, ValueError):
            continue
        setting = f"reward.functions=[{name}]"
        text = f"grade as {name} does"
        yield Variant(f"grader-{name}", "reward", text, setting=setting), scores
    contained = [float(str(s["answer"]) in s["response"]) for s in batch.samples]
    text = "accept a response that contains the answer anywhere"
    yield Variant("grader-contains", "reward", text), contained
