"""Rewards that compare an answer with a reference as text: equal, nearly equal (ANLS); and its form."""

import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rlinf_vl.rewards.latex import last_boxed
from rlinf_vl.rewards.text_key import text_key

#: Longest text that is compared, in characters.
LONGEST = 1000
_ANSWER_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")


def final_answer(said: str) -> str | None:
    r"""What stands in the last `<answer>…</answer>`, in the last `\boxed{…}`, or in a box in that tag; None without either."""
    tagged = _ANSWER_TAG.findall(said)
    boxed = last_boxed(tagged[-1] if tagged else said, LONGEST)
    found = boxed if boxed is not None else tagged[-1] if tagged else None
    return None if found is None else _TEXT.sub(r"\1", found).strip()


def references(answer: str, answers: Any = None) -> list[str]:
    """Return the texts that are right: those of a list, or of a JSON list of texts; otherwise the answer, out of its box or tag."""
    listed = answers
    for text in (answers, answer):
        if isinstance(text, str) and text.lstrip().startswith('["') and (listed is None or text is answers):
            with suppress(ValueError):
                listed = json.loads(text)
    if isinstance(listed, Sequence) and not isinstance(listed, str) and listed:
        return [str(one) for one in listed]
    inner = final_answer(answer)
    return [answer if inner is None else inner]


def with_truths(wanted: Sequence[str]) -> list[str]:
    """Return references, and beside true and false, as rows with a boolean answer have them, "yes" and "no"."""
    truths = {"true": "yes", "false": "no"}
    return [*wanted, *(truths[one] for one in wanted if one in truths)]


def exact(said: str, answer: str, answers: Any = None) -> bool:
    """Return whether the final answer (see `final_answer`; without one, all that is said) is a reference, spaces at the ends and
    repeated ones aside, and how a minus sign is written."""
    given = final_answer(said)
    wanted = {_literal(one) for one in references(answer, answers)}
    return _literal(said if given is None else given) in wanted - {""}


def exact_alnum(said: str, answer: str, answers: Any = None) -> bool:
    """Return whether it is `exact` in lower case and without punctuation, which counts beside digits: `text_key`."""
    given = final_answer(said)
    text = said if given is None else given
    if len(text) > LONGEST:
        return False
    return text_key(text) in {text_key(one) for one in with_truths(references(answer, answers))} - {""}


def _literal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text.replace("−", "-")).split())


def anls(said: str, answer: str, answers: Any = None, *, threshold: float = 0.5) -> float:
    """Average Normalized Levenshtein Similarity of one answer (Biten et al. 2019, "Scene Text Visual Question Answering",
    equation 1): the largest 1 − NL(reference, answer) over the references with NL < threshold, or 0; NL is the edit distance divided
    by the longer text's length, in lower case."""
    given = final_answer(said)
    given = " ".join((said if given is None else given).lower().split())[:LONGEST]
    best = 0.0
    for one in references(answer, answers):
        wanted = " ".join(one.lower().split())[:LONGEST]
        longer = max(len(given), len(wanted))
        distance = edit_distance(given, wanted) / longer if longer else 0.0
        best = max(best, 1.0 - distance if distance < threshold else 0.0)
    return best


def edit_distance(a: str, b: str) -> int:
    """Least number of insertions, deletions and replacements of a character (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def format_reward(response: str, *, tags: Sequence[str] | None = None, box: bool = False) -> bool:
    r"""Whether a response has the form asked for: each of `tags` once, in this order, with something in it and nothing beside them;
    with `box`, a `\boxed{…}` that is closed and not empty, and text beside it, behind the last tag.

    Tags are `think` and `answer` unless given (DeepSeek-AI 2025, "DeepSeek-R1", section 2.2.2), or none with a box. `tags: [think]`
    and `box: true` is EasyR1's form. A first tag that the generation prompt has opened may lack its beginning.
    """
    tags = (() if box else ("think", "answer")) if tags is None else tags
    rest = response
    for number, tag in enumerate(tags):
        opening, closing = f"<{tag}>", f"</{tag}>"
        if number == 0 and opening not in rest:
            rest = opening + rest
        before, found, inner = rest.partition(opening)
        inner, closed, rest = inner.partition(closing)
        if not found or not closed or before.strip() or not inner.strip() or response.count(closing) != 1:
            return False
        if response.count(opening) > 1 or any(f"<{other}>" in inner for other in tags):
            return False
    if not box:
        return not rest.strip() if tags else True
    boxed = last_boxed(rest, len(rest))
    return boxed is not None and bool(boxed.strip())


def length(response: str, *, response_tokens: int, tokens: int, alpha: float = 0.0003, delta: float = 0.5) -> float:
    """clip(α · (tokens − n) + δ, 0, 1) for a response of n tokens: δ at the budget, more below, less beyond it (LCPO-Max in Aggarwal
    and Welleck 2025, "L1: Controlling How Long A Reasoning Model Thinks With Reinforcement Learning")."""
    return min(1.0, max(0.0, alpha * (tokens - response_tokens) + delta))


def overlong(response: str, *, response_tokens: int, max_tokens: int, buffer: int) -> float:
    """0 up to max_tokens − buffer tokens, then down in a line to −1 at max_tokens, and −1 beyond (Yu et al. 2025, "DAPO: An
    Open-Source LLM Reinforcement Learning System at Scale", equation 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - response_tokens) / buffer))
