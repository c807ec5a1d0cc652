"""The reward for a choice among options: which one a response chooses.

A response is read in this order, and the first reading that is there decides, also where it chooses nothing:

1. the last `<answer>…</answer>` or `\\boxed{…}`;
2. all that is said, where that is an option and nothing else;
3. the last line, where that is one;
4. announcements, such as "the answer is B", in their order: a later one replaces an earlier one, "not B" and "B is wrong"
   take B back, and "B or C" chooses nothing;
5. letters in brackets and "option B", where those that are not denied are all the same.

Invariants: a letter is upper case or in brackets, and ends there: "a triangle" is no A, nor is A', A4 or A = 3. A letter beside
another option's text chooses nothing.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlinf_vl.rewards.text_key import text_key
from rlinf_vl.rewards.texts import MAX_TEXT_LENGTH, exact_alnum, final_answer, references

#: Characters before a letter in which it may be denied or joined to another; four times as many behind an announcement.
NEAR = 60
_DENIAL = (
    r"(?:not|never|n['’]t|cannot|neither|nor|no|incorrect|wrong|false|invalid|impossible|ruled\s+out|eliminated?|excluded?|"
    r"excluding|rejected?|discard(?:ed)?|unlikely|rather\s+than|instead\s+of|except|opposite)"
)
_MARKS = r"[*_$\"'“”‘’`\s]{0,8}"
#: A letter that is an option's: in brackets of either kind, or upper case and with nothing that would make it a word or a formula.
_ENDS = r"(?![\w'’′^]|\s{0,2}[=+/<>|×÷√°%^]|-\w|\s{0,2}[-−]\s{0,2}\d)"
_LETTER = (
    r"(?:[(\[{]\s{0,3}(?P<inner>[A-Za-z])\s{0,3}[)\]}]|[\"'“‘`](?P<quoted>(?-i:[A-Z]))[\"'”’`]|"
    rf"(?P<bare>(?-i:[A-Z]))\)?{_ENDS})"
)
_ALONE = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?\s*[.:,)]?")
_LED = re.compile(r"(?:[(\[{]\s*([A-Za-z])\s*[)\]}]\s*[.:,-]?|([A-Z])\s*(?:[).:,]|\s[-–—])(?=\s))\s*(\S.*)")
_NAMED = re.compile(
    rf"(?:the\s+)?(?:correct\s+|right\s+)?(?:option|choice|answer|letter)\s*[:=]?\s*{_MARKS}{_LETTER}", re.I
)
#: Words that may follow a letter which is not an article: "the answer is A because …".
_CONNECTORS = (
    r"(?:because|since|as|so|for|due|given|which|where|while|whereas|with|by|based|from|in|on|here|too|and|or|but|not|is|are|"
    r"therefore|thus|hence|then|if|unless|rather|instead|according|when|that)"
)
_ANNOUNCEMENT = re.compile(
    r"(?P<before>(?:\b(?:if|whether|suppose|assuming|assume|unless|not|never|cannot)|n['’]t)\b[\w\s,']{0,20})?"
    r"\b(?:"
    r"(?:answer|option|choice)\b(?:\s+(?:to|for|of|here|in|among|from|then|therefore|that|which)\b[^.\n!?;:]{0,60}?)?(?:,\s*\w+,)?\s*"
    r"(?:\b(?P<verb>is|would\s+be|must\s+be|should\s+be)\b|:|=|(?=\s?(?-i:[(\[*$\"A-Z])))"
    r"|(?:choose|select|pick|go\s+with)\b(?:\s+(?:option|answer|choice))?(?=\s)"
    r")\s*[:=]?|(?:答案|选项)\s*[是为]?\s*:?",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    rf"(?<![\w'’]){_MARKS}{_LETTER}{_MARKS}(?:\s*:)?\s*(?:is|are|was|looks|seems|must\s+be|can(?:not)?\b|does|do|has|would)"
    rf"(?P<rest>[^.\n!?;]{{0,60}})"
)
_CORRECT = re.compile(
    r"^\s*(?:clearly\s+|therefore\s+|thus\s+|the\s+|most\s+|only\s+)*(?:correct|right|best|true|answer)\b", re.I
)
_COORDINATED = re.compile(
    rf"{_MARKS}\(?\s*(?:,|/|&|\+|;|\||\\|…|[-–—.](?=[A-Z])|\b(?:or|and|and/or|to|through|versus|vs)\b)\s*"
    rf"(?:(?:or|and|no|either|possibly|maybe|perhaps|option|choice|mean|i)\b,?\s*)*{_MARKS}{_LETTER}"
    r"(?!\s+(?:is|are|was|has|does|do|would|looks|seems|cannot|can)\b)"
    r"|[ \t]+(?P<spaced>[A-Z])(?![\w'’]|\s+(?:is|are|was|has|does|would|cannot|can)\b)"
)
_MENTION = re.compile(
    rf"(?:\b(?:option|choice|answer)\s+{_MARKS}{_LETTER})|[(\[](?P<only>[A-Za-z])[)\]]", re.IGNORECASE
)
_DENIED = re.compile(rf"\b{_DENIAL}\b|n['’]t\b", re.IGNORECASE)
#: A denial of what follows on it.
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|excluding|rather\s+than|instead\s+of|all\s+but|eliminate|exclude|reject|discard|"
    r"rule\s+out|cannot\s+be|if|whether|unless)|n['’]t(?:\s+be)?)\s+(?:\w+\s+)?$",
    re.IGNORECASE,
)
#: What stands before an announcement that is no claim: "I doubt that", "it is false that", "the worst option is".
_DOUBT = re.compile(
    rf"\b(?:{_DENIAL}|nobody|none|doubt\w*|some|others|people|avoid|unclear|unsure|maybe|perhaps|might|could|worst|least|second|"
    r"other|another|first|initially|before|if|whether|unless|suppose|assume|claim)\b|n['’]t\b",
    re.IGNORECASE,
)
#: What takes back the answer before it.
_RETRACTION = re.compile(
    r"(?:^|[\s.,;(])(?:no\s*[,.;:!]|wait\b|actually\b|correction\b|sorry\b|scratch\s+that|(?:just\s+)?kidding\b|i\s+meant?\b|on\s+second\s+thought|"
    r"\(\s*(?:not|no|wrong|incorrect|false)\b)|"
    r"^[^.\n]{0,60}?\b(?:which|that|it|this)\s+(?:is|was)\s+(?:wrong|incorrect|false|not\s+(?:right|correct|true))\b",
    re.IGNORECASE,
)
#: A letter before this, joined to what follows.
_JOINED = re.compile(rf"{_LETTER}\s*(?:,|/|&|\bor\b|\band\b)\s*{_MARKS}(?:or\s+|and\s+)?$")
#: Sentences that are an answer: "so B", "it is B", "B because …".
_SPOKEN = re.compile(
    rf"(?:(?:(?:so|therefore|thus|hence)\b,?\s*)?(?:it|this|that)\s*(?:is|['’]s)\s+|(?:so|therefore|thus|hence)\b,?\s+){_MARKS}"
    rf"{_LETTER}{_MARKS}[.!]?",
    re.IGNORECASE,
)
_REASONED = re.compile(rf"{_LETTER}{_MARKS},?\s*(?:because|since)\b(?P<rest>.*)", re.IGNORECASE)
_LEAD_IN = re.compile(
    r"(?:(?:based|in|from|according|looking)\b[^,.;]{0,40},\s*)?(?:(?:so|thus|therefore|hence|then)\b,?\s*)?"
    r"(?:it|this|that|(?:the|this|that)\s+\w+(?:\s+\w+)?(?:\s+(?:in|of|on|at)\s+(?:the|this)\s+\w+)?)\s*(?:['’]s|is|are|was)\s+",
    re.IGNORECASE,
)
_FILLERS = re.compile(
    r"^(?:(?:option|choice|letter|answer|definitely|clearly|therefore|thus|indeed)\b[,:]?\s*)+", re.IGNORECASE
)
_ARTICLE = re.compile(r"(?:a|an|the)\s+", re.IGNORECASE)
_CLAUSE_END = re.compile(rf"[.!;](?=\s|$)|\s[-–—(]|[,:]?\s+(?:{_CONNECTORS})\b|,\s+(?={_CONNECTORS}\b)", re.IGNORECASE)
#: Remarks on an answer that was given already.
_REMARK = re.compile(
    r"(?:clear|obvious|simple|correct|right|unique|consistent|supported|confirmed|based|given|found|determined|obtained|shown|"
    r"therefore|below|above|as\s+follows)\b",
    re.IGNORECASE,
)
_LISTED = re.compile(r"(?:^|(?<=\s))[(\[]?([A-Z])[)\].:]\s+(.*?)(?=\s+[(\[]?[A-Z][)\].:]\s|\s*$)", re.DOTALL)
_DELIMITERS = re.compile(r"\\[()\[\]]")
_FULL_WIDTH = str.maketrans({chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | {"。": "."})
_OPTION_LED = re.compile(r"(?:[(\[]\s*([A-Z])\s*[)\]]|([A-Z])\s*[).:])\s*\S.*", re.DOTALL)


def choice(said: str, answer: str, options: Any = None, choices: Any = None, prompt: str = "") -> bool:
    """Return whether the option that is chosen is the right one. The reference is `B`, `(B)`, `B. circle`, or the option's text.

    Options are those of the row's column `options` or `choices` (a list, a mapping or either as JSON), or those that the question
    lists as `A. …` or `(A) …`.
    """
    known = _options(options if options is not None else choices) or _listed(prompt)
    reader = Reader(known, frozenset(known) or frozenset(string.ascii_uppercase[:10]))
    wanted = {reader.option(reference) for reference in references(answer)} - {None}
    if not wanted:
        return exact_alnum(said, answer)
    return reader.chosen(said) in wanted


@dataclass(frozen=True)
class Claim:
    """One announcement of a text, from `start` to `end`: the option, None for none or several; and whether it is denied."""

    start: int
    end: int
    letter: str | None
    is_denied: bool


@dataclass(frozen=True)
class Reader:
    """Reads which option a text chooses.

    Attributes:
        known: the options' texts by letter; empty where they are not known.
        letters: the letters that are options.
    """

    known: Mapping[str, str]
    letters: frozenset[str]

    def chosen(self, said: str) -> str | None:
        """Return the letter of the option that a response chooses; None if it chooses none, or several."""
        said = _DELIMITERS.sub(" ", said.translate(_FULL_WIDTH))
        explicit = final_answer(said)
        if explicit is not None:
            return self._stated(explicit[:MAX_TEXT_LENGTH]) or self._announced(explicit[:MAX_TEXT_LENGTH])
        text = said.strip()
        lines = [line for line in text[-MAX_TEXT_LENGTH:].splitlines() if line.strip()]
        if not lines:
            return None
        if len(lines) == 1 and len(text) <= MAX_TEXT_LENGTH and (letter := self._stated(text)) is not None:
            return letter
        whole_lines = {self._bare(line) or self._of_text(line) for line in lines} - {None}
        letter = self._bare(lines[-1]) or self._of_text(lines[-1])
        if letter is not None:
            return letter if whole_lines == {letter} else None
        led_letters = {self.option(line) for line in lines} - {None}
        last_letter = self._stated(lines[-1])
        if last_letter is not None and led_letters <= {last_letter}:
            return last_letter
        first_letter = self.option(lines[0]) if led_letters == {self.option(lines[0])} else None
        claims = self._claims(text[-MAX_TEXT_LENGTH:])
        if all(claim.is_denied for claim in claims) and first_letter is None:
            letter = self._mentioned(text[-MAX_TEXT_LENGTH:])
            return None if letter in {claim.letter for claim in claims} else letter
        return self._announced(text[-MAX_TEXT_LENGTH:], first_letter)

    def option(self, text: str) -> str | None:
        """Return the letter of the option that a text is, if it is one and nothing else."""
        text = _bare_text(text)
        return self._bare(text) or self._of_text(text) or self._led(text)

    def _bare(self, text: str) -> str | None:
        """Return the letter that is all of a text."""
        alone = _ALONE.fullmatch(_bare_text(text))
        return self._letter(alone[1]) if alone else None

    def _letter(self, letter: str) -> str | None:
        return letter.upper() if letter.upper() in self.letters else None

    def _of_text(self, text: str) -> str | None:
        """Return the letter of the one option that has this text, with an article before it or not."""
        text = _bare_text(text)
        if not self.known or len(text) > self._longest:
            return None
        for wording, letters in zip((text, _without_article(text)), self._letters_by_key, strict=True):
            letter = letters.get(text_key(wording))
            if letter is not None:
                return letter or None
        return None

    @cached_property
    def _longest(self) -> int:
        """The length of a text beyond which it is no option's, however it is spelled."""
        return 3 * max(map(len, self.known.values())) + 20

    @cached_property
    def _letters_by_key(self) -> tuple[dict[str, str], dict[str, str]]:
        """Letters by the keys of options as they are, and of options without an article; "" where two have the same key."""
        whole: dict[str, str] = {}
        bare: dict[str, str] = {}
        for letter, option in self.known.items():
            for letters, key in ((whole, text_key(option)), (bare, text_key(_without_article(option)))):
                if key:
                    letters[key] = "" if key in letters else letter
        return whole, bare

    def _led(self, text: str) -> str | None:
        """Return the letter that leads a line, as in "B. circle", unless the rest denies it or tells of another option."""
        led = _LED.fullmatch(text)
        letter = self._letter(led[1] or led[2]) if led else None
        if led is None or letter is None or not self._agrees(letter, led[3]):
            return None
        return letter

    def _agrees(self, letter: str, rest: str) -> bool:
        """Return whether what follows on a letter may be said of it."""
        other = self._of_text(rest)
        if other is not None or text_key(rest) == text_key(self.known.get(letter, "")):
            return other in (None, letter)
        if re.match(rf"(?:is|are|was|it\s+is|it['’]s)?\s*{_DENIAL}\b", rest, re.IGNORECASE):
            return False
        joined = re.search(r"\b(?:or|and)\s+(.*)$", rest)
        if joined and self._of_clause(joined[1]) not in (None, letter):
            return False
        mentioned = {self._letter(_letter_in(m)) for m in re.finditer(rf"(?<!\w){_LETTER}", rest)}
        mentioned -= {None, letter} | ({"A", "I"} if not re.search(r"[(\[]A[)\]]|\bA[).:]", rest) else set())
        return not mentioned and not self._claims(rest)

    def _stated(self, text: str) -> str | None:
        """Return the option that a text states: as `option`, "option B", "B circle", "it is a circle"."""
        text = _bare_text(text)
        if "\n" in text:
            return None
        if (letter := self.option(text)) is not None:
            return letter
        if named := _NAMED.fullmatch(text.rstrip(" .*\"')")) or _NAMED.fullmatch(text.rstrip(" .*\"'")):
            return self._letter(_letter_in(named))
        spoken = re.fullmatch(rf"(?:(?:option|choice|answer)\s*[:=]?\s*)?{_LETTER}\s+(?P<rest>.+)", text, re.IGNORECASE)
        for form in (_SPOKEN, _REASONED):
            if (match := form.fullmatch(text)) and (letter := self._letter(_letter_in(match))) is not None:
                is_conflicting = form is _REASONED and not self._agrees(letter, match["rest"].strip())
                return None if is_conflicting else letter
        if spoken:
            letter = self._letter(_letter_in(spoken))
            if letter is not None and self._of_text(spoken["rest"]) == letter:
                return letter
        lead_in = _LEAD_IN.match(text)
        if lead_in and not re.search(rf"\b{_DENIAL}\b|\b(?:second|other|worst|least)\b", lead_in[0], re.IGNORECASE):
            return self._of_text(text[lead_in.end() :])
        return None

    def _announced(self, text: str, letter: str | None = None) -> str | None:
        """Return what the announcements of a text come to, beginning with `letter`."""
        end = 0
        for claim in self._claims(text):
            if not claim.is_denied:
                letter, end = claim.letter, claim.end
            elif claim.letter == letter:
                letter = None
        is_doubtful = end > 0 and letter is not None and self._names_another(letter, text[end:])
        return None if is_doubtful or _RETRACTION.search(text[end:]) else letter

    def _names_another(self, letter: str, rest: str) -> bool:
        """Return whether the sentence goes on to another option that it does not deny, before it gives its reasons."""
        sentence = re.split(r"[.!?]\s|\n|\b(?:because|since|as|while|whereas)\b", rest, maxsplit=1)[0]
        for match in re.finditer(rf"(?<!\w){_LETTER}", sentence):
            other = self._letter(_letter_in(match))
            is_article = match["bare"] in ("A", "I") and re.match(r"\s+[a-z]", sentence[match.end() :])
            near = sentence[max(0, match.start() - NEAR) : match.end() + NEAR]
            if other not in (None, letter) and not is_article and not _DENIED.search(near):
                return True
        return False

    def _claims(self, text: str) -> list["Claim"]:
        """Return the announcements of a text, in order."""
        claims: list[Claim] = []
        for match in _ANNOUNCEMENT.finditer(text):
            claim = self._claim(text, match)
            if claim is not None:
                claims.append(claim)
        for match in _VERDICT.finditer(text):
            letter = self._letter(_letter_in(match))
            before = text[max(0, match.start() - NEAR) : match.start()].rstrip("*_$\"'“‘` ") + " "
            if letter is None or _DENIED_BEFORE.search(before) or text[match.end() :].startswith("?"):
                continue
            verdict = re.split(r",|\b(?:since|because|as|so|but)\b", match[0], maxsplit=1)[0]
            is_denied = _DENIED.search(verdict) is not None
            is_conditional = re.search(r"\b(?:if|unless)\b", match["rest"]) is not None
            if not is_denied and (is_conditional or not _CORRECT.match(match["rest"])):
                continue
            is_denied = is_denied or _DOUBT.search(_clause_before(text, match.start())) is not None
            is_joined = _JOINED.search(before.rstrip()) is not None
            claims.append(Claim(match.start(), match.end(), None if is_joined and not is_denied else letter, is_denied))
        return sorted(claims, key=lambda claim: claim.start)

    def _claim(self, text: str, match: re.Match[str]) -> Claim | None:
        """Return what one announcement says; None if it says nothing of an option."""
        following = text[match.end() : match.end() + 4 * NEAR]
        sentence = re.split(r"\n|(?<=[.!?])\s+(?=[A-Z(][a-z ])", following.strip(), maxsplit=1)[0].strip()
        before = (match["before"] or "").lower()
        if re.match(r"if|whether|suppos|assum|unless", before) or sentence.endswith("?"):
            return None
        is_denied = bool(before) or _DOUBT.search(_clause_before(text, match.start())) is not None
        if denial := re.match(
            r"(?:(?:definitely|clearly|certainly|surely|obviously)\s+)?(?:not|never|n['’]t)\b\s*", sentence
        ):
            is_denied, sentence = True, sentence[denial.end() :]
            if replaced := re.search(r"\b(?:but|rather)\b\s*(?:it\s+is\s+)?", sentence):
                is_denied, sentence = False, sentence[replaced.end() :]
        sentence = _FILLERS.sub("", sentence)

        def claim(letter: str | None, denied: bool) -> Claim:
            end = match.end() + max(0, following.find(sentence)) + (found.end() if found else 0)
            return Claim(match.start(), end, letter, denied)

        found = re.match(rf"{_MARKS}(?:\\(?:text|mathrm|mathbf|textbf)\{{\s*)?{_LETTER}", sentence)
        letter = self._letter(_letter_in(found)) if found else None
        rest = sentence[found.end() :] if found else ""
        if found is not None and letter is not None and self._ends_here(letter, found, rest):
            if re.match(rf"{_MARKS}\s*(?:is|was|would\s+be|can\s?be|seems)?\s*{_DENIAL}\b", rest, re.IGNORECASE):
                starts_clause = re.match(rf"{_MARKS},?\s*(?:not|rather\s+than|instead\s+of|no)\b", rest, re.IGNORECASE)
                return claim(letter, starts_clause is None or is_denied)
            coordinated = _COORDINATED.match(following[following.find(sentence) + found.end() :])
            if not is_denied and _JOINED.search(text[max(0, match.start() - NEAR) : match.start()]):
                return claim(None, False)
            if coordinated and not is_denied:
                other = _letter_in(coordinated) or coordinated["spaced"]
                if self._letter(other) not in (None, letter):
                    return claim(None, False)
            is_subject = re.match(r"\s+(?:is|are|was)\s+what\b", rest) is not None
            if is_subject or match["verb"] and re.match(r"\s+(?:is|are|was)\b", rest):
                return claim(None, False)
            if re.match(rf"{_MARKS}\s*(?:if|unless)\b", rest, re.IGNORECASE):
                return None
            return claim(letter, is_denied)
        found = None
        of_text = self._of_clause(sentence)
        if of_text is not None:
            return claim(of_text, is_denied)
        is_verb = match["verb"] is not None or re.search(r"[:=]\s*$", match[0]) is not None
        if not is_verb or not sentence or _REMARK.match(sentence) or is_denied:
            return None
        return claim(None, False)

    def _ends_here(self, letter: str, found: re.Match[str], rest: str) -> bool:
        """Return whether a letter ends where it stands: no article before a noun, and no other option's text beside it."""
        rest = re.sub(r"^[*_$\"'“”‘’`}]+", "", rest)
        if re.match(r"\s+[^\W\d_]", rest) and not re.match(rf"\s+(?:{_CONNECTORS}\b|[A-Z](?!\w))", rest):
            following = rest.strip()
            return self._of_clause(following) == letter
        if re.match(r"\s+\.?\d", rest):
            return self._of_clause(rest.strip()) == letter
        if bracketed := re.match(r"\s*\(([^()]*)\)", rest):
            return self._of_text(bracketed[1]) in (None, letter)
        if punctuated := re.match(r"\s*[.):,]\s*|\s+[-–—]\s+", rest):
            other = self._of_clause(rest[punctuated.end() :])
            return other in (None, letter)
        return True

    def _of_clause(self, sentence: str) -> str | None:
        """Return the option whose text a sentence begins with, if its clause ends there."""
        sentence = sentence.strip()
        ends = [len(sentence), *(match.start() for match in _CLAUSE_END.finditer(sentence))]
        for end in ends:
            clause = sentence[:end]
            if (letter := self._of_text(clause)) is not None:
                is_coordinated = re.match(r"\s*,?\s*(?:or|and)\b", sentence[end:], re.IGNORECASE)
                return None if is_coordinated else letter
        return None

    def _mentioned(self, text: str) -> str | None:
        """Return the one option that is named in brackets or as "option B", and not denied; None if there are several."""
        letters: set[str] = set()
        for sentence in re.split(r"(?<=[.!?;…])\s|\n", text):
            matches = list(_MENTION.finditer(sentence))
            if sentence.rstrip().endswith("?"):
                continue
            for number, match in enumerate(matches):
                start = matches[number - 1].end() if number else 0
                end = matches[number + 1].start() if number + 1 < len(matches) else len(sentence)
                letter = self._letter(_letter_in(match) or match["only"])
                denial = _DENIED_BEFORE.search(sentence[start : match.start()])
                # what stands right before the next letter is said of that one
                denial = denial or _DENIED.search(_DENIED_BEFORE.sub("", sentence[match.end() : end]))
                denial = denial or (_DENIED.search(sentence[: match.start()]) if not number else None)
                if letter is not None and not denial:
                    letters.add(letter)
        return letters.pop() if len(letters) == 1 else None


def _letter_in(match: re.Match[str]) -> str:
    return match["inner"] or match["quoted"] or match["bare"] or ""


def _clause_before(text: str, start: int) -> str:
    """Return what stands before a place in its clause."""
    clauses = re.split(r"[.\n!?;:,…]|\b(?:so|therefore|thus|hence|but|then)\b", text[max(0, start - 100) : start])
    return clauses[-1]


def _bare_text(text: str) -> str:
    """Return a text without the marks, quotes or dollar signs that enclose it."""
    text = text.strip()
    while len(text) > 2 and (text[0] == text[-1] and text[0] in "*`\"'$_" or text[0] + text[-1] in ("“”", "‘’")):
        text = text[1:-1].strip()
    return text


def _without_article(text: str) -> str:
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def _options(given: Any) -> dict[str, str]:
    """Return the options of a column by letter."""
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
    led = [_OPTION_LED.fullmatch(text.strip()) for text in texts]
    if all(led) and [m[1] or m[2] for m in led if m] == list(string.ascii_uppercase[: len(texts)]):
        texts = [re.sub(r"^[(\[]?\s*[A-Z]\s*[)\].:]+\s*", "", text.strip()) for text in texts]
    return dict(zip(string.ascii_uppercase, texts, strict=False))


def _listed(prompt: str) -> dict[str, str]:
    """Return the options that a question lists, from A on."""
    known: dict[str, str] = {}
    for letter, text in _LISTED.findall(prompt[-4 * MAX_TEXT_LENGTH :]):
        if letter == "A":
            known = {}
        if letter == string.ascii_uppercase[len(known) % 26]:
            known[letter] = text.strip().splitlines()[0] if text.strip() else ""
    return known if len(known) > 1 else {}
