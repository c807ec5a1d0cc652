"""Rewards for texts that equal a reference, nearly equal one (ANLS), or have a required form."""

import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlinf_vl.rewards.latex import last_boxed
from rlinf_vl.rewards.text_key import text_key

#: Longest text that is compared, in characters: ANLS takes time quadratic in it.
MAX_TEXT_LENGTH = 1000
_ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")


def final_answer(reply: str) -> str | None:
    r"""Return the content of the last `<answer>…</answer>` or `\boxed{…}`; None without either.

    A box in that tag goes before the rest of the tag.
    """
    tag_contents = _ANSWER_TAG.findall(reply)
    boxed = last_boxed(tag_contents[-1] if tag_contents else reply, MAX_TEXT_LENGTH)
    content = boxed if boxed is not None else tag_contents[-1] if tag_contents else None
    return None if content is None else _TEXT.sub(r"\1", content).strip()


def references(answer: str, answers: Any = None) -> list[str]:
    """Return the texts that are right.

    These are the entries of `answers`, a list or a JSON list of texts, or of `answer` where it is
    such a JSON list; otherwise `answer` alone, taken out of its box or tag.
    """
    texts = answers
    for text in (answers, answer):
        if (
            isinstance(text, str)
            and text.lstrip().startswith('["')
            and (texts is None or text is answers)
        ):
            with suppress(ValueError):  # no JSON: compare the text as it is
                texts = json.loads(text)
    if isinstance(texts, Sequence) and not isinstance(texts, str) and texts:
        return [str(text) for text in texts]
    inner = final_answer(answer)
    return [answer if inner is None else inner]


def with_truths(reference_texts: Sequence[str]) -> list[str]:
    """Return the references, and "yes" beside "true", "no" beside "false".

    A row with a boolean answer has "true" or "false" as its reference.
    """
    truths = {"true": "yes", "false": "no"}
    return [*reference_texts, *(truths[text] for text in reference_texts if text in truths)]


def exact(final_response: str, answer: str, answers: Any = None) -> bool:
    """Return whether the final answer equals a reference.

    Without a final answer (see `final_answer`) the whole reply is compared. Spaces at the ends,
    repeated spaces and the spelling of a minus sign are ignored. An empty reference equals nothing.
    """
    final = final_answer(final_response)
    reference_keys = {_literal(text) for text in references(answer, answers)}
    return _literal(final_response if final is None else final) in reference_keys - {""}


def exact_alnum(final_response: str, answer: str, answers: Any = None) -> bool:
    """Return whether the final answer equals a reference, case and punctuation aside.

    `text_key` defines the comparison; punctuation beside digits counts.
    """
    final = final_answer(final_response)
    text = final_response if final is None else final
    if len(text) > MAX_TEXT_LENGTH:
        return False
    reference_texts = with_truths(references(answer, answers))
    return text_key(text) in {text_key(reference) for reference in reference_texts} - {""}


def _literal(text: str) -> str:
    """Return a text with one spelling of spaces, minus signs and composed characters."""
    return " ".join(unicodedata.normalize("NFC", text.replace("−", "-")).split())


def anls(final_response: str, answer: str, answers: Any = None, *, threshold: float = 0.5) -> float:
    """Return the Average Normalized Levenshtein Similarity (ANLS) of one answer, 0 to 1.

    It is the largest 1 − NL(reference, answer) over the references with NL < threshold, or 0. NL is
    the edit distance divided by the longer text's length, in lower case (Biten et al. 2019, "Scene
    Text Visual Question Answering", equation 1).
    """
    final = final_answer(final_response)
    answer_text = " ".join((final_response if final is None else final).lower().split())[
        :MAX_TEXT_LENGTH
    ]
    best_similarity = 0.0
    for reference in references(answer, answers):
        reference_text = " ".join(reference.lower().split())[:MAX_TEXT_LENGTH]
        max_length = max(len(answer_text), len(reference_text))
        distance = edit_distance(answer_text, reference_text) / max_length if max_length else 0.0
        best_similarity = max(best_similarity, 1.0 - distance if distance < threshold else 0.0)
    return best_similarity


def edit_distance(a: str, b: str) -> int:
    """Return the least number of insertions, deletions and replacements of a character.

    This is the distance of Levenshtein 1966, in O(len(a) · len(b)) time and O(len(b)) memory.
    """
    # One row of the table: distances[j] is that of a's first i characters and b's first j.
    # `diagonal` is the entry of the previous row at j - 1, which the assignment overwrites.
    distances = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, distances[0] = distances[0], i
        for j, y in enumerate(b, 1):
            diagonal, distances[j] = (
                distances[j],
                min(distances[j] + 1, distances[j - 1] + 1, diagonal + (x != y)),
            )
    return distances[-1]


def format_reward(response: str, *, tags: Sequence[str] | None = None, box: bool = False) -> bool:
    r"""Return whether a response has the required form.

    The form is each of `tags` once, in this order, not empty, with nothing outside of them. With
    `box` it is also a closed, non-empty `\boxed{…}` after the last tag, where other text may stand.

    Tags are `think` and `answer` by default (DeepSeek-AI 2025, "DeepSeek-R1", section 2.2.2), and
    none with a box. `tags: [think]` and `box: true` is EasyR1's form. The opening of the first tag
    may be missing, since some generation prompts end with it.
    """
    tags = (() if box else ("think", "answer")) if tags is None else tags
    remainder = response
    for number, tag in enumerate(tags):
        opening, closing = f"<{tag}>", f"</{tag}>"
        if number == 0 and opening not in remainder:
            remainder = opening + remainder
        leading_text, opening_match, inner = remainder.partition(opening)
        inner, closing_match, remainder = inner.partition(closing)
        if not opening_match or not closing_match or leading_text.strip() or not inner.strip():
            return False
        if response.count(closing) != 1 or response.count(opening) > 1:
            return False
        if any(f"<{nested_tag}>" in inner for nested_tag in tags):
            return False
    if not box:
        return not remainder.strip() if tags else True
    boxed = last_boxed(remainder, len(remainder))
    return boxed is not None and bool(boxed.strip())


def length(
    response: str, *, response_tokens: int, tokens: int, alpha: float = 0.0003, delta: float = 0.5
) -> float:
    """Return clip(α · (tokens − n) + δ, 0, 1) for a response of n tokens.

    That is δ at the budget of `tokens`, more below and less beyond it: LCPO-Max in Aggarwal and
    Welleck 2025, "L1: Controlling How Long A Reasoning Model Thinks With Reinforcement Learning".
    """
    return min(1.0, max(0.0, alpha * (tokens - response_tokens) + delta))


def overlong(response: str, *, response_tokens: int, max_tokens: int, buffer: int) -> float:
    """Return the soft penalty for a long response, −1 to 0.

    It is 0 up to max_tokens − buffer tokens, falls linearly to −1 at max_tokens, and is −1 beyond
    (Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", equation
    13).
    """
    return max(-1.0, min(0.0, (max_tokens - buffer - response_tokens) / buffer))
