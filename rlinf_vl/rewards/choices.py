"""The reward for a choice among options, and the reading of a response for the option it chooses.

A response is read in this order. The first reading that exists decides, even if it chooses nothing:

1. the last `<answer>…</answer>` or `\\boxed{…}`;
2. the whole reply, where it is an option and nothing else;
3. the last line, where it is an option;
4. announcements, such as "the answer is B", in their order: a later one replaces an earlier one,
   "not B" and "B is wrong" take B back, and "B or C" chooses nothing;
5. letters in brackets and "option B", where those that are not denied are all the same.

Invariants: a letter is upper case or in brackets, and no word or formula goes on from it: "a
triangle" is no A, nor is A', A4 or A = 3. A letter beside another option's text chooses nothing.
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

#: Characters before a letter that may deny it or join it to another letter. After an announcement
#: four times as many are read.
CONTEXT_LENGTH = 60
_DENIAL = (
    r"(?:not|never|n['’]t|cannot|neither|nor|no|incorrect|wrong|false|invalid|impossible|"
    r"ruled\s+out|eliminated?|excluded?|excluding|rejected?|discard(?:ed)?|unlikely|"
    r"rather\s+than|instead\s+of|except|opposite)"
)
#: Emphasis, quotes, dollar signs and spaces around a letter.
_MARKS = r"[*_$\"'“”‘’`\s]{0,8}"
#: The end of a letter: nothing follows that would make it a word or a formula.
_ENDS = r"(?![\w'’′^]|\s{0,2}[=+/<>|×÷√°%^]|-\w|\s{0,2}[-−]\s{0,2}\d)"
#: The letter of an option: in brackets or quotes, or upper case alone.
_LETTER = (
    r"(?:[(\[{]\s{0,3}(?P<inner>[A-Za-z])\s{0,3}[)\]}]|[\"'“‘`](?P<quoted>(?-i:[A-Z]))[\"'”’`]|"
    rf"(?P<bare>(?-i:[A-Z]))\)?{_ENDS})"
)
#: A letter and nothing else.
_ALONE = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?\s*[.:,)]?")
#: A letter, and the text of its line: "B. circle". Groups 1 and 2 are the letter, group 3 the text.
_LED = re.compile(
    r"(?:[(\[{]\s*([A-Za-z])\s*[)\]}]\s*[.:,-]?|([A-Z])\s*(?:[).:,]|\s[-–—])(?=\s))\s*(\S.*)"
)
#: A letter with its kind: "option B", "the correct answer: B".
_NAMED = re.compile(
    r"(?:the\s+)?(?:correct\s+|right\s+)?(?:option|choice|answer|letter)\s*[:=]?\s*"
    rf"{_MARKS}{_LETTER}",
    re.IGNORECASE,
)
#: Words that may follow a letter which is not an article: "the answer is A because …".
_CONNECTORS = (
    r"(?:because|since|as|so|for|due|given|which|where|while|whereas|with|by|based|from|in|on|"
    r"here|too|and|or|but|not|is|are|therefore|thus|hence|then|if|unless|rather|instead|"
    r"according|when|that)"
)
#: Words that announce an answer, up to the option: "the answer to this question is", "I choose".
#: `qualifier` makes it hypothetical or denies it.
_ANNOUNCEMENT = re.compile(
    r"(?P<qualifier>(?:\b(?:if|whether|suppose|assuming|assume|unless|not|never|cannot)|n['’]t)\b"
    r"[\w\s,']{0,20})?"
    r"\b(?:"
    r"(?:answer|option|choice)\b"
    r"(?:\s+(?:to|for|of|here|in|among|from|then|therefore|that|which)\b[^.\n!?;:]{0,60}?)?"
    r"(?:,\s*\w+,)?\s*"
    r"(?:\b(?P<verb>is|would\s+be|must\s+be|should\s+be)\b|:|=|(?=\s?(?-i:[(\[*$\"A-Z])))"
    r"|(?:choose|select|pick|go\s+with)\b(?:\s+(?:option|answer|choice))?(?=\s)"
    r")\s*[:=]?|(?:答案|选项)\s*[是为]?\s*:?",
    re.IGNORECASE,
)
#: A sentence about a letter: "B is clearly correct", "A cannot be it". `predicate` is its end.
_VERDICT = re.compile(
    rf"(?<![\w'’]){_MARKS}{_LETTER}{_MARKS}(?:\s*:)?\s*"
    r"(?:is|are|was|looks|seems|must\s+be|can(?:not)?\b|does|do|has|would)"
    rf"(?P<predicate>[^.\n!?;]{{0,60}})"
)
#: The predicate of a sentence that calls a letter correct.
_CORRECT = re.compile(
    r"^\s*(?:clearly\s+|therefore\s+|thus\s+|the\s+|most\s+|only\s+)*"
    r"(?:correct|right|best|true|answer)\b",
    re.IGNORECASE,
)
#: Another letter that is joined to the one before: "B or C", "B, C", "B C".
_COORDINATED = re.compile(
    rf"{_MARKS}\(?\s*(?:,|/|&|\+|;|\||\\|…|[-–—.](?=[A-Z])|"
    r"\b(?:or|and|and/or|to|through|versus|vs)\b)\s*"
    r"(?:(?:or|and|no|either|possibly|maybe|perhaps|option|choice|mean|i)\b,?\s*)*"
    rf"{_MARKS}{_LETTER}"
    r"(?!\s+(?:is|are|was|has|does|do|would|looks|seems|cannot|can)\b)"
    r"|[ \t]+(?P<spaced>[A-Z])(?![\w'’]|\s+(?:is|are|was|has|does|would|cannot|can)\b)"
)
#: A letter that is mentioned as an option, without any claim: "option B", "(B)".
_MENTION = re.compile(
    rf"(?:\b(?:option|choice|answer)\s+{_MARKS}{_LETTER})|[(\[](?P<only>[A-Za-z])[)\]]",
    re.IGNORECASE,
)
_DENIED = re.compile(rf"\b{_DENIAL}\b|n['’]t\b", re.IGNORECASE)
#: A denial of the letter that follows it.
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|excluding|rather\s+than|instead\s+of|all\s+but|"
    r"eliminate|exclude|reject|discard|rule\s+out|cannot\s+be|if|whether|unless)|n['’]t(?:\s+be)?)"
    r"\s+(?:\w+\s+)?$",
    re.IGNORECASE,
)
#: Words before an announcement that make it no claim: "I doubt that", "it is false that".
_DOUBT = re.compile(
    rf"\b(?:{_DENIAL}|nobody|none|doubt\w*|some|others|people|avoid|unclear|unsure|maybe|"
    r"perhaps|might|could|worst|least|second|other|another|first|initially|before|if|whether|"
    r"unless|suppose|assume|claim)\b|n['’]t\b",
    re.IGNORECASE,
)
#: Words that take back the answer before them: "no, wait", "scratch that", "which is wrong".
_RETRACTION = re.compile(
    r"(?:^|[\s.,;(])(?:no\s*[,.;:!]|wait\b|actually\b|correction\b|sorry\b|scratch\s+that|"
    r"(?:just\s+)?kidding\b|i\s+meant?\b|on\s+second\s+thought|"
    r"\(\s*(?:not|no|wrong|incorrect|false)\b)|"
    r"^[^.\n]{0,60}?\b(?:which|that|it|this)\s+(?:is|was)\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|true))\b",
    re.IGNORECASE,
)
#: A letter that is joined to the announcement or letter after it: "A or".
_JOINED = re.compile(rf"{_LETTER}\s*(?:,|/|&|\bor\b|\band\b)\s*{_MARKS}(?:or\s+|and\s+)?$")
#: A sentence that states a letter: "so B", "it is B".
_SPOKEN = re.compile(
    r"(?:(?:(?:so|therefore|thus|hence)\b,?\s*)?(?:it|this|that)\s*(?:is|['’]s)\s+"
    r"|(?:so|therefore|thus|hence)\b,?\s+)"
    rf"{_MARKS}{_LETTER}{_MARKS}[.!]?",
    re.IGNORECASE,
)
#: A letter and its reason: "B because …".
_REASONED = re.compile(rf"{_LETTER}{_MARKS},?\s*(?:because|since)\b(?P<reason>.*)", re.IGNORECASE)
#: Words before an option's text: "Based on the picture, it is", "So the shape in the middle is".
_LEAD_IN = re.compile(
    r"(?:(?:based|in|from|according|looking)\b[^,.;]{0,40},\s*)?"
    r"(?:(?:so|thus|therefore|hence|then)\b,?\s*)?"
    r"(?:it|this|that|(?:the|this|that)\s+\w+(?:\s+\w+)?"
    r"(?:\s+(?:in|of|on|at)\s+(?:the|this)\s+\w+)?)\s*(?:['’]s|is|are|was)\s+",
    re.IGNORECASE,
)
#: Words between an announcement and its option: "the answer is clearly option B".
_FILLERS = re.compile(
    r"^(?:(?:option|choice|letter|answer|definitely|clearly|therefore|thus|indeed)\b[,:]?\s*)+",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"(?:a|an|the)\s+", re.IGNORECASE)
#: Places where an option's text may end within a sentence.
_CLAUSE_END = re.compile(
    rf"[.!;](?=\s|$)|\s[-–—(]|[,:]?\s+(?:{_CONNECTORS})\b|,\s+(?={_CONNECTORS}\b)", re.IGNORECASE
)
#: The start of a remark on an answer that stands elsewhere: "the answer is clear", "… is below".
_REMARK = re.compile(
    r"(?:clear|obvious|simple|correct|right|unique|consistent|supported|confirmed|based|given|"
    r"found|determined|obtained|shown|therefore|below|above|as\s+follows)\b",
    re.IGNORECASE,
)
#: An option in a question: "A. …" or "(A) …", up to the next one.
_LISTED = re.compile(
    r"(?:^|(?<=\s))[(\[]?([A-Z])[)\].:]\s+(.*?)(?=\s+[(\[]?[A-Z][)\].:]\s|\s*$)", re.DOTALL
)
#: LaTeX's marks around a formula: \( \), \[ \].
_DELIMITERS = re.compile(r"\\[()\[\]]")
_FULL_WIDTH = str.maketrans(
    {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | {"。": "."}
)
#: An option's text in a column that begins with its letter: "A. circle".
_OPTION_LED = re.compile(r"(?:[(\[]\s*([A-Z])\s*[)\]]|([A-Z])\s*[).:])\s*\S.*", re.DOTALL)


def choice(
    said: str, answer: str, options: Any = None, choices: Any = None, prompt: str = ""
) -> bool:
    """Return whether a reply chooses the right option.

    The reference is `B`, `(B)`, `B. circle`, or the option's text. Options are those of the row's
    column `options` or `choices` (a list, a mapping or either as JSON), or those that the question
    lists as `A. …` or `(A) …`. A reference that is no option is compared by `exact_alnum`.
    """
    option_texts = _options(options if options is not None else choices) or _listed(prompt)
    reader = Reader(option_texts, frozenset(option_texts) or frozenset(string.ascii_uppercase[:10]))
    right_letters = {reader.option(reference) for reference in references(answer)} - {None}
    if not right_letters:
        return exact_alnum(said, answer)
    return reader.chosen(said) in right_letters


@dataclass(frozen=True)
class Claim:
    """A claim about an option, such as "the answer is B" or "B is wrong".

    Attributes:
        start: position of its first character in the text.
        end: position after its last character.
        letter: the option's letter; None if it names none, or several.
        is_denied: whether it says that the option is not the answer.
    """

    start: int
    end: int
    letter: str | None
    is_denied: bool


@dataclass(frozen=True)
class Reader:
    """The reader of the option that a text chooses.

    Attributes:
        options: the options' texts by letter; empty where they are unknown.
        letters: the letters that are options.
    """

    options: Mapping[str, str]
    letters: frozenset[str]

    def chosen(self, reply: str) -> str | None:
        """Return the letter of the option that a reply chooses; None for none, or several."""
        reply = _DELIMITERS.sub(" ", reply.translate(_FULL_WIDTH))
        final = final_answer(reply)
        if final is not None:
            return self._stated(final[:MAX_TEXT_LENGTH]) or self._announced(final[:MAX_TEXT_LENGTH])
        text = reply.strip()
        lines = [line for line in text[-MAX_TEXT_LENGTH:].splitlines() if line.strip()]
        if not lines:
            return None
        if (
            len(lines) == 1
            and len(text) <= MAX_TEXT_LENGTH
            and (letter := self._stated(text)) is not None
        ):
            return letter
        # A line that is an option as a whole decides, unless another such line has another option.
        whole_lines = {self._bare(line) or self._of_text(line) for line in lines} - {None}
        letter = self._bare(lines[-1]) or self._of_text(lines[-1])
        if letter is not None:
            return letter if whole_lines == {letter} else None
        # Lines that begin with a letter must agree: a response may go through all options first.
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
        """Return the letter that is the whole of a text."""
        match = _ALONE.fullmatch(_bare_text(text))
        return self._letter(match[1]) if match else None

    def _letter(self, letter: str) -> str | None:
        """Return a letter in upper case if it is an option's."""
        return letter.upper() if letter.upper() in self.letters else None

    def _of_text(self, text: str) -> str | None:
        """Return the letter of the only option with this text, articles aside."""
        text = _bare_text(text)
        # Saves computing a long text's key.
        if not self.options or len(text) > self._max_option_length:
            return None
        for wording, letters in zip(
            (text, _without_article(text)), self._letters_by_key, strict=True
        ):
            letter = letters.get(text_key(wording))
            if letter is not None:
                return letter or None
        return None

    @cached_property
    def _max_option_length(self) -> int:
        """The largest length of a text that may equal an option's, however it is spelled."""
        return 3 * max(map(len, self.options.values())) + 20

    @cached_property
    def _letters_by_key(self) -> tuple[dict[str, str], dict[str, str]]:
        """Letters by the options' keys: of the whole texts, and of the texts without an article.

        A letter is "" where two options have the same key.
        """
        letters_by_text: dict[str, str] = {}
        letters_by_noun: dict[str, str] = {}
        for letter, option in self.options.items():
            noun_key = text_key(_without_article(option))
            for letters, key in ((letters_by_text, text_key(option)), (letters_by_noun, noun_key)):
                if key:
                    letters[key] = "" if key in letters else letter
        return letters_by_text, letters_by_noun

    def _led(self, text: str) -> str | None:
        """Return the letter at the start of a line, as in "B. circle".

        Return None if the line denies the letter or names another option.
        """
        match = _LED.fullmatch(text)
        letter = self._letter(match[1] or match[2]) if match else None
        if match is None or letter is None or not self._agrees(letter, match[3]):
            return None
        return letter

    def _agrees(self, letter: str, tail: str) -> bool:
        """Return whether the text after a letter (`tail`) can be about that letter's option."""
        tail_letter = self._of_text(tail)
        if tail_letter is not None or text_key(tail) == text_key(self.options.get(letter, "")):
            return tail_letter in (None, letter)
        if re.match(rf"(?:is|are|was|it\s+is|it['’]s)?\s*{_DENIAL}\b", tail, re.IGNORECASE):
            return False
        joined = re.search(r"\b(?:or|and)\s+(.*)$", tail)
        if joined and self._of_clause(joined[1]) not in (None, letter):
            return False
        mentioned_letters = {
            self._letter(_letter_in(m)) for m in re.finditer(rf"(?<!\w){_LETTER}", tail)
        }
        # A and I are words, too, unless A is marked as a letter.
        words = {"A", "I"} if not re.search(r"[(\[]A[)\]]|\bA[).:]", tail) else set()
        mentioned_letters -= {None, letter} | words
        return not mentioned_letters and not self._claims(tail)

    def _stated(self, text: str) -> str | None:
        """Return the option that a text states: "B", "option B", "B circle", "it is a circle"."""
        text = _bare_text(text)
        if "\n" in text:
            return None
        if (letter := self.option(text)) is not None:
            return letter
        if named := _NAMED.fullmatch(text.rstrip(" .*\"')")) or _NAMED.fullmatch(
            text.rstrip(" .*\"'")
        ):
            return self._letter(_letter_in(named))
        lettered = re.fullmatch(
            rf"(?:(?:option|choice|answer)\s*[:=]?\s*)?{_LETTER}\s+(?P<option>.+)",
            text,
            re.IGNORECASE,
        )
        for form in (_SPOKEN, _REASONED):
            if (match := form.fullmatch(text)) and (
                letter := self._letter(_letter_in(match))
            ) is not None:
                is_conflicting = form is _REASONED and not self._agrees(
                    letter, match["reason"].strip()
                )
                return None if is_conflicting else letter
        if lettered:  # a letter with the text of its option
            letter = self._letter(_letter_in(lettered))
            if letter is not None and self._of_text(lettered["option"]) == letter:
                return letter
        lead_in = _LEAD_IN.match(text)
        if lead_in and not re.search(
            rf"\b{_DENIAL}\b|\b(?:second|other|worst|least)\b", lead_in[0], re.IGNORECASE
        ):
            return self._of_text(text[lead_in.end() :])
        return None

    def _announced(self, text: str, letter: str | None = None) -> str | None:
        """Return the letter that remains after all claims of a text, starting from `letter`."""
        end = 0
        for claim in self._claims(text):
            if not claim.is_denied:
                letter, end = claim.letter, claim.end
            elif claim.letter == letter:
                letter = None
        is_doubtful = end > 0 and letter is not None and self._names_another(letter, text[end:])
        return None if is_doubtful or _RETRACTION.search(text[end:]) else letter

    def _names_another(self, letter: str, tail: str) -> bool:
        """Return whether the sentence goes on (`tail`) to another option without denying it.

        Its reasons don't count: they may compare options.
        """
        sentence = re.split(r"[.!?]\s|\n|\b(?:because|since|as|while|whereas)\b", tail, maxsplit=1)[
            0
        ]
        for match in re.finditer(rf"(?<!\w){_LETTER}", sentence):
            named_letter = self._letter(_letter_in(match))
            is_article = match["bare"] in ("A", "I") and re.match(
                r"\s+[a-z]", sentence[match.end() :]
            )
            context = sentence[
                max(0, match.start() - CONTEXT_LENGTH) : match.end() + CONTEXT_LENGTH
            ]
            if (
                named_letter not in (None, letter)
                and not is_article
                and not _DENIED.search(context)
            ):
                return True
        return False

    def _claims(self, text: str) -> list["Claim"]:
        """Return the claims of a text in order: announcements, and sentences about a letter."""
        claims: list[Claim] = []
        for match in _ANNOUNCEMENT.finditer(text):
            claim = self._claim(text, match)
            if claim is not None:
                claims.append(claim)
        for match in _VERDICT.finditer(text):
            letter = self._letter(_letter_in(match))
            context = (
                text[max(0, match.start() - CONTEXT_LENGTH) : match.start()].rstrip("*_$\"'“‘` ")
                + " "
            )
            if (
                letter is None
                or _DENIED_BEFORE.search(context)
                or text[match.end() :].startswith("?")
            ):
                continue
            verdict = re.split(r",|\b(?:since|because|as|so|but)\b", match[0], maxsplit=1)[0]
            is_denied = _DENIED.search(verdict) is not None
            is_conditional = re.search(r"\b(?:if|unless)\b", match["predicate"]) is not None
            if not is_denied and (is_conditional or not _CORRECT.match(match["predicate"])):
                continue
            is_denied = is_denied or _DOUBT.search(_clause_before(text, match.start())) is not None
            # "A or B is correct" chooses nothing; a denial holds for its letter all the same.
            is_joined = _JOINED.search(context.rstrip()) is not None
            claims.append(
                Claim(
                    match.start(),
                    match.end(),
                    None if is_joined and not is_denied else letter,
                    is_denied,
                )
            )
        return sorted(claims, key=lambda claim: claim.start)

    def _claim(self, text: str, match: re.Match[str]) -> Claim | None:
        """Return the claim of one announcement; None if it claims nothing about an option."""
        following = text[match.end() : match.end() + 4 * CONTEXT_LENGTH]
        sentence = re.split(r"\n|(?<=[.!?])\s+(?=[A-Z(][a-z ])", following.strip(), maxsplit=1)[
            0
        ].strip()
        qualifier = (match["qualifier"] or "").lower()
        if re.match(r"if|whether|suppos|assum|unless", qualifier) or sentence.endswith("?"):
            return None
        is_denied = (
            bool(qualifier) or _DOUBT.search(_clause_before(text, match.start())) is not None
        )
        if denial := re.match(
            r"(?:(?:definitely|clearly|certainly|surely|obviously)\s+)?(?:not|never|n['’]t)\b\s*",
            sentence,
        ):
            is_denied, sentence = True, sentence[denial.end() :]
            if replaced := re.search(r"\b(?:but|rather)\b\s*(?:it\s+is\s+)?", sentence):
                is_denied, sentence = False, sentence[replaced.end() :]
        sentence = _FILLERS.sub("", sentence)

        def claim(letter: str | None, denied: bool) -> Claim:
            # `letter_match` is bound below; it is None again where the option's text was named.
            end = (
                match.end()
                + max(0, following.find(sentence))
                + (letter_match.end() if letter_match else 0)
            )
            return Claim(match.start(), end, letter, denied)

        letter_match = re.match(
            rf"{_MARKS}(?:\\(?:text|mathrm|mathbf|textbf)\{{\s*)?{_LETTER}", sentence
        )
        letter = self._letter(_letter_in(letter_match)) if letter_match else None
        tail = sentence[letter_match.end() :] if letter_match else ""
        if (
            letter_match is not None
            and letter is not None
            and self._ends_here(letter, letter_match, tail)
        ):
            if re.match(
                rf"{_MARKS}\s*(?:is|was|would\s+be|can\s?be|seems)?\s*{_DENIAL}\b",
                tail,
                re.IGNORECASE,
            ):
                starts_clause = re.match(
                    rf"{_MARKS},?\s*(?:not|rather\s+than|instead\s+of|no)\b", tail, re.IGNORECASE
                )
                return claim(letter, starts_clause is None or is_denied)
            coordinated = _COORDINATED.match(
                following[following.find(sentence) + letter_match.end() :]
            )
            if not is_denied and _JOINED.search(
                text[max(0, match.start() - CONTEXT_LENGTH) : match.start()]
            ):
                return claim(None, False)
            if coordinated and not is_denied:
                joined_letter = _letter_in(coordinated) or coordinated["spaced"]
                if self._letter(joined_letter) not in (None, letter):
                    return claim(None, False)
            is_subject = re.match(r"\s+(?:is|are|was)\s+what\b", tail) is not None
            if is_subject or match["verb"] and re.match(r"\s+(?:is|are|was)\b", tail):
                return claim(None, False)
            if re.match(rf"{_MARKS}\s*(?:if|unless)\b", tail, re.IGNORECASE):
                return None
            return claim(letter, is_denied)
        letter_match = None
        option_letter = self._of_clause(sentence)
        if option_letter is not None:
            return claim(option_letter, is_denied)
        is_verb = match["verb"] is not None or re.search(r"[:=]\s*$", match[0]) is not None
        if not is_verb or not sentence or _REMARK.match(sentence) or is_denied:
            return None
        return claim(None, False)

    def _ends_here(self, letter: str, letter_match: re.Match[str], tail: str) -> bool:
        """Return whether a letter is no article, and has no other option's text beside it."""
        tail = re.sub(r"^[*_$\"'“”‘’`}]+", "", tail)
        if re.match(r"\s+[^\W\d_]", tail) and not re.match(
            rf"\s+(?:{_CONNECTORS}\b|[A-Z](?!\w))", tail
        ):
            following = tail.strip()
            return self._of_clause(following) == letter
        if re.match(r"\s+\.?\d", tail):
            return self._of_clause(tail.strip()) == letter
        if bracketed := re.match(r"\s*\(([^()]*)\)", tail):
            return self._of_text(bracketed[1]) in (None, letter)
        if punctuated := re.match(r"\s*[.):,]\s*|\s+[-–—]\s+", tail):
            option_letter = self._of_clause(tail[punctuated.end() :])
            return option_letter in (None, letter)
        return True

    def _of_clause(self, sentence: str) -> str | None:
        """Return the option whose text is the first clause, or clauses, of a sentence."""
        sentence = sentence.strip()
        ends = [len(sentence), *(match.start() for match in _CLAUSE_END.finditer(sentence))]
        for end in ends:
            clause = sentence[:end]
            if (letter := self._of_text(clause)) is not None:
                is_coordinated = re.match(r"\s*,?\s*(?:or|and)\b", sentence[end:], re.IGNORECASE)
                return None if is_coordinated else letter
        return None

    def _mentioned(self, text: str) -> str | None:
        """Return the only option that is mentioned, as "(B)" or "option B", and not denied.

        Return None if there are several.
        """
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
                # A denial right before the next letter is about that letter.
                denial = denial or _DENIED.search(
                    _DENIED_BEFORE.sub("", sentence[match.end() : end])
                )
                denial = denial or (
                    _DENIED.search(sentence[: match.start()]) if not number else None
                )
                if letter is not None and not denial:
                    letters.add(letter)
        return letters.pop() if len(letters) == 1 else None


def _letter_in(match: re.Match[str]) -> str:
    """Return the letter in a match of a pattern with `_LETTER`; "" without."""
    return match["inner"] or match["quoted"] or match["bare"] or ""


def _clause_before(text: str, start: int) -> str:
    """Return the part of a clause before the position `start`, at most 100 characters."""
    clauses = re.split(
        r"[.\n!?;:,…]|\b(?:so|therefore|thus|hence|but|then)\b", text[max(0, start - 100) : start]
    )
    return clauses[-1]


def _bare_text(text: str) -> str:
    """Return a text without the marks, quotes or dollar signs that enclose it."""
    text = text.strip()
    while len(text) > 2 and (
        text[0] == text[-1] and text[0] in "*`\"'$_" or text[0] + text[-1] in ("“”", "‘’")
    ):
        text = text[1:-1].strip()
    return text


def _without_article(text: str) -> str:
    """Return a text without an article at its start."""
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def _options(column: Any) -> dict[str, str]:
    """Return the options' texts by letter from a column's value; {} if it holds no options."""
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except ValueError:
            return _listed(column)
    if isinstance(column, Mapping):
        return {
            str(key).strip().upper(): str(value)
            for key, value in column.items()
            if value is not None
        }
    if not isinstance(column, Sequence):
        return {}
    texts = [str(option) for option in column]
    matches = [_OPTION_LED.fullmatch(text.strip()) for text in texts]
    # Texts that carry their letters, in order: take the letters off.
    if all(matches) and [m[1] or m[2] for m in matches if m] == list(
        string.ascii_uppercase[: len(texts)]
    ):
        texts = [re.sub(r"^[(\[]?\s*[A-Z]\s*[)\].:]+\s*", "", text.strip()) for text in texts]
    return dict(zip(string.ascii_uppercase, texts, strict=False))


def _listed(prompt: str) -> dict[str, str]:
    """Return the options that a question lists, from A on."""
    options: dict[str, str] = {}
    for letter, text in _LISTED.findall(prompt[-4 * MAX_TEXT_LENGTH :]):
        if letter == "A":  # a new list: the last one counts
            options = {}
        if letter == string.ascii_uppercase[len(options) % 26]:
            options[letter] = text.strip().splitlines()[0] if text.strip() else ""
    return options if len(options) > 1 else {}
