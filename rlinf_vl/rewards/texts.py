"""Rewards that compare an answer with a reference as text: equal, a choice among options, nearly equal (ANLS); and its form."""

import json
import re
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlinf_vl.rewards.latex import last_boxed

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
    """Texts that are right: those of a list, or of a JSON list of texts; otherwise the answer itself, out of its box or tag."""
    listed = answers
    if listed is None and answer.lstrip().startswith('["'):
        with suppress(ValueError):
            listed = json.loads(answer)
    if isinstance(listed, Sequence) and not isinstance(listed, str) and listed:
        return [str(one) for one in listed]
    inner = final_answer(answer)
    return [answer if inner is None else inner]


def exact(said: str, answer: str, answers: Any = None) -> bool:
    """Whether the final answer (see `final_answer`; without one, all that is said) is a reference, spaces at the ends and repeated
    ones aside."""
    given = final_answer(said)
    wanted = {" ".join(one.split()) for one in references(answer, answers)}
    return " ".join((said if given is None else given).split()) in wanted - {""}


def exact_alnum(said: str, answer: str, answers: Any = None) -> bool:
    """`exact` by letters and digits alone, in lower case."""
    given = final_answer(said)
    return _alnum(said if given is None else given) in {_alnum(one) for one in references(answer, answers)} - {""}


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


_LETTER = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\]]?\s*[.:,)]?")
_LETTER_AND_TEXT = re.compile(r"(?:[(\[]\s*([A-Z])\s*[)\]]|([A-Z])\s*[).:])\s*\S.*", re.DOTALL)
_ANNOUNCED = re.compile(
    r"(?:answer|option|choice|choose|select)(?:\s+(?:is|would be|must be))?\s*[:=]?\s*[*$\"']*[(\[]?([A-Za-z])(?![A-Za-z'])",
    re.IGNORECASE,
)
_IN_BRACKETS = re.compile(r"[(\[]([A-Z])[)\]]")
_LISTED = re.compile(r"(?:^|(?<=\s))[(\[]?([A-Z])[)\].:]\s+(.*?)(?=\s+[(\[]?[A-Z][)\].:]\s|\s*$)", re.DOTALL)


def choice(said: str, answer: str, options: Any = None, choices: Any = None, prompt: str = "") -> bool:
    """Whether the option that is chosen is the right one. Both may be written as `B`, `(B)`, `B. circle`, or as the option's text.

    What is chosen stands in a tag or a box (`final_answer`), behind "the answer is" and the like, in brackets, or is all that is
    said, or its last line. Options are those of the row's column `options` or `choices` (a list, a mapping or either as JSON), or
    those that the question lists as `A. …` or `(A) …`.
    """
    known = _options(options if options is not None else choices) or _listed(prompt)
    letters = frozenset(known) or frozenset(string.ascii_uppercase[:10])
    wanted = _chosen(references(answer)[0], known, letters)
    if wanted is None:
        return exact_alnum(said, answer)
    explicit = final_answer(said)
    if explicit is not None:
        return _chosen(explicit, known, letters) == wanted
    for candidate in (said, said.strip().rpartition("\n")[2]):
        if (found := _chosen(candidate, known, letters)) is not None:
            return found == wanted
    for pattern in (_ANNOUNCED, _IN_BRACKETS):
        if named := [letter.upper() for letter in pattern.findall(said[-LONGEST:]) if letter.upper() in letters]:
            return named[-1] == wanted
    return False


def _chosen(text: str, known: Mapping[str, str], letters: frozenset[str]) -> str | None:
    """The letter of the option that a text is, if it is one and nothing else."""
    text = text.strip().strip("*$`\"' \n").strip()
    same = [letter for letter, option in known.items() if _alnum(option) == _alnum(text)] if _alnum(text) else []
    if len(same) == 1:
        return same[0]
    if (alone := _LETTER.fullmatch(text)) and alone[1].upper() in letters:
        return alone[1].upper()
    if (led := _LETTER_AND_TEXT.fullmatch(text)) and len(text) <= LONGEST:
        letter = led[1] or led[2]
        return letter if letter in letters else None
    return None


def _options(given: Any) -> dict[str, str]:
    """Options by letter."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return _listed(given)
    if isinstance(given, Mapping):
        return {str(key).strip().upper(): str(value) for key, value in given.items() if value is not None}
    if not isinstance(given, Sequence):
        return {}
    texts = [str(one) for one in given]
    led = [_LETTER_AND_TEXT.fullmatch(text.strip()) for text in texts]
    if all(led) and [m[1] or m[2] for m in led if m] == list(string.ascii_uppercase[: len(texts)]):
        texts = [re.sub(r"^[(\[]?\s*[A-Z]\s*[)\].:]+\s*", "", text.strip()) for text in texts]
    return dict(zip(string.ascii_uppercase, texts, strict=False))


def _listed(prompt: str) -> dict[str, str]:
    """The options that a question lists, from A on."""
    known: dict[str, str] = {}
    for letter, text in _LISTED.findall(prompt[-4 * LONGEST :]):
        if letter == "A":
            known = {}
        if letter == string.ascii_uppercase[len(known) % 26]:
            known[letter] = text.strip().splitlines()[0] if text.strip() else ""
    return known if len(known) > 1 else {}


def _alnum(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


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
