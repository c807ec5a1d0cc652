"""The reward for a choice among options, and the reading of a response for the option it chooses.

A response is read in this order. The first reading that exists decides, even if it chooses nothing:

1. the last `<answer>…</answer>` or `\\boxed{…}`;
2. the whole reply, where it is an option and nothing else;
3. the last line, where it is an option;
4. announcements, such as "the answer is B", in their order: a later one replaces an earlier one,
   "not B" and "B is wrong" take B back, and "B or C" chooses nothing;
5. letters in brackets and "option B", where those that are not denied are all the same.

Invariant: a letter beside another option's text chooses nothing. `choice_patterns` has the wording,
`options` the question's options.
"""

import re
import string
from dataclasses import dataclass
from typing import Any

import rlinf_vl.rewards.choice_patterns as patterns
from rlinf_vl.rewards.options import Options, bare_text, listed_options, options_of
from rlinf_vl.rewards.text_key import text_key
from rlinf_vl.rewards.texts import MAX_TEXT_LENGTH, exact_alnum, final_answer, references

#: Characters before a letter that may deny it or join it to another letter. After an announcement
#: four times as many are read.
CONTEXT_LENGTH = 60
#: LaTeX's marks around a formula: \( \), \[ \].
_DELIMITERS = re.compile(r"\\[()\[\]]")
_FULL_WIDTH = str.maketrans(
    {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | {"。": "."}
)


def choice(
    final_response: str, answer: str, options: Any = None, choices: Any = None, prompt: str = ""
) -> bool:
    """Return whether a reply chooses the right option.

    The reference is `B`, `(B)`, `B. circle`, or the option's text. Options are those of the row's
    column `options` or `choices` (a list, a mapping or either as JSON), or those that the question
    lists as `A. …` or `(A) …`. A reference that is no option is compared by `exact_alnum`.
    """
    texts = options_of(options if options is not None else choices) or listed_options(prompt)
    reader = Reader(Options(texts, frozenset(texts) or frozenset(string.ascii_uppercase[:10])))
    right_letters = {reader.option(reference) for reference in references(answer)} - {None}
    if not right_letters:
        return exact_alnum(final_response, answer)
    return reader.chosen(final_response) in right_letters


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
        options: the options of the question.
    """

    options: Options

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
        whole_lines = {self._bare(line) or self.options.of_text(line) for line in lines} - {None}
        letter = self._bare(lines[-1]) or self.options.of_text(lines[-1])
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
        text = bare_text(text)
        return self._bare(text) or self.options.of_text(text) or self._led(text)

    def _bare(self, text: str) -> str | None:
        """Return the letter that is the whole of a text."""
        match = patterns.ALONE.fullmatch(bare_text(text))
        return self.options.letter(match[1]) if match else None

    def _led(self, text: str) -> str | None:
        """Return the letter at the start of a line, as in "B. circle".

        Return None if the line denies the letter or names another option.
        """
        match = patterns.LED.fullmatch(text)
        letter = self.options.letter(match[1] or match[2]) if match else None
        if match is None or letter is None or not self._agrees(letter, match[3]):
            return None
        return letter

    def _agrees(self, letter: str, tail: str) -> bool:
        """Return whether the text after a letter (`tail`) can be about that letter's option."""
        tail_letter = self.options.of_text(tail)
        if tail_letter is not None or text_key(tail) == text_key(
            self.options.texts.get(letter, "")
        ):
            return tail_letter in (None, letter)
        if re.match(rf"(?:is|are|was|it\s+is|it['’]s)?\s*{patterns.DENIAL}\b", tail, re.IGNORECASE):
            return False
        joined = re.search(r"\b(?:or|and)\s+(.*)$", tail)
        if joined and self._of_clause(joined[1]) not in (None, letter):
            return False
        mentioned_letters = {
            self.options.letter(patterns.letter_in(m))
            for m in re.finditer(rf"(?<!\w){patterns.LETTER}", tail)
        }
        # A and I are words, too, unless A is marked as a letter.
        words = {"A", "I"} if not re.search(r"[(\[]A[)\]]|\bA[).:]", tail) else set()
        mentioned_letters -= {None, letter} | words
        return not mentioned_letters and not self._claims(tail)

    def _stated(self, text: str) -> str | None:
        """Return the option that a text states: "B", "option B", "B circle", "it is a circle"."""
        text = bare_text(text)
        if "\n" in text:
            return None
        if (letter := self.option(text)) is not None:
            return letter
        if named := patterns.NAMED.fullmatch(text.rstrip(" .*\"')")) or patterns.NAMED.fullmatch(
            text.rstrip(" .*\"'")
        ):
            return self.options.letter(patterns.letter_in(named))
        lettered = re.fullmatch(
            rf"(?:(?:option|choice|answer)\s*[:=]?\s*)?{patterns.LETTER}\s+(?P<option>.+)",
            text,
            re.IGNORECASE,
        )
        for form in (patterns.SPOKEN, patterns.REASONED):
            if (match := form.fullmatch(text)) and (
                letter := self.options.letter(patterns.letter_in(match))
            ) is not None:
                is_conflicting = form is patterns.REASONED and not self._agrees(
                    letter, match["reason"].strip()
                )
                return None if is_conflicting else letter
        if lettered:  # a letter with the text of its option
            letter = self.options.letter(patterns.letter_in(lettered))
            if letter is not None and self.options.of_text(lettered["option"]) == letter:
                return letter
        lead_in = patterns.LEAD_IN.match(text)
        if lead_in and not re.search(
            rf"\b{patterns.DENIAL}\b|\b(?:second|other|worst|least)\b", lead_in[0], re.IGNORECASE
        ):
            return self.options.of_text(text[lead_in.end() :])
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
        return None if is_doubtful or patterns.RETRACTION.search(text[end:]) else letter

    def _names_another(self, letter: str, tail: str) -> bool:
        """Return whether the sentence goes on (`tail`) to another option without denying it.

        Its reasons don't count: they may compare options.
        """
        sentence = re.split(r"[.!?]\s|\n|\b(?:because|since|as|while|whereas)\b", tail, maxsplit=1)[
            0
        ]
        for match in re.finditer(rf"(?<!\w){patterns.LETTER}", sentence):
            named_letter = self.options.letter(patterns.letter_in(match))
            is_article = match["bare"] in ("A", "I") and re.match(
                r"\s+[a-z]", sentence[match.end() :]
            )
            context = sentence[
                max(0, match.start() - CONTEXT_LENGTH) : match.end() + CONTEXT_LENGTH
            ]
            if (
                named_letter not in (None, letter)
                and not is_article
                and not patterns.DENIED.search(context)
            ):
                return True
        return False

    def _claims(self, text: str) -> list["Claim"]:
        """Return the claims of a text in order: announcements, and sentences about a letter."""
        claims: list[Claim] = []
        for match in patterns.ANNOUNCEMENT.finditer(text):
            claim = self._claim(text, match)
            if claim is not None:
                claims.append(claim)
        for match in patterns.VERDICT.finditer(text):
            letter = self.options.letter(patterns.letter_in(match))
            context = (
                text[max(0, match.start() - CONTEXT_LENGTH) : match.start()].rstrip("*_$\"'“‘` ")
                + " "
            )
            if (
                letter is None
                or patterns.DENIED_BEFORE.search(context)
                or text[match.end() :].startswith("?")
            ):
                continue
            verdict = re.split(r",|\b(?:since|because|as|so|but)\b", match[0], maxsplit=1)[0]
            is_denied = patterns.DENIED.search(verdict) is not None
            is_conditional = re.search(r"\b(?:if|unless)\b", match["predicate"]) is not None
            if not is_denied and (is_conditional or not patterns.CORRECT.match(match["predicate"])):
                continue
            is_denied = (
                is_denied
                or patterns.DOUBT.search(patterns.clause_before(text, match.start())) is not None
            )
            # "A or B is correct" chooses nothing; a denial holds for its letter all the same.
            is_joined = patterns.JOINED.search(context.rstrip()) is not None
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
            bool(qualifier)
            or patterns.DOUBT.search(patterns.clause_before(text, match.start())) is not None
        )
        if denial := re.match(
            r"(?:(?:definitely|clearly|certainly|surely|obviously)\s+)?(?:not|never|n['’]t)\b\s*",
            sentence,
        ):
            is_denied, sentence = True, sentence[denial.end() :]
            if replaced := re.search(r"\b(?:but|rather)\b\s*(?:it\s+is\s+)?", sentence):
                is_denied, sentence = False, sentence[replaced.end() :]
        sentence = patterns.FILLERS.sub("", sentence)

        def claim(letter: str | None, denied: bool) -> Claim:
            # `letter_match` is bound below; it is None again where the option's text was named.
            end = (
                match.end()
                + max(0, following.find(sentence))
                + (letter_match.end() if letter_match else 0)
            )
            return Claim(match.start(), end, letter, denied)

        letter_match = re.match(
            rf"{patterns.MARKS}(?:\\(?:text|mathrm|mathbf|textbf)\{{\s*)?{patterns.LETTER}",
            sentence,
        )
        letter = self.options.letter(patterns.letter_in(letter_match)) if letter_match else None
        tail = sentence[letter_match.end() :] if letter_match else ""
        if (
            letter_match is not None
            and letter is not None
            and self._ends_here(letter, letter_match, tail)
        ):
            if re.match(
                rf"{patterns.MARKS}\s*(?:is|was|would\s+be|can\s?be|seems)?\s*{patterns.DENIAL}\b",
                tail,
                re.IGNORECASE,
            ):
                starts_clause = re.match(
                    rf"{patterns.MARKS},?\s*(?:not|rather\s+than|instead\s+of|no)\b",
                    tail,
                    re.IGNORECASE,
                )
                return claim(letter, starts_clause is None or is_denied)
            coordinated = patterns.COORDINATED.match(
                following[following.find(sentence) + letter_match.end() :]
            )
            if not is_denied and patterns.JOINED.search(
                text[max(0, match.start() - CONTEXT_LENGTH) : match.start()]
            ):
                return claim(None, False)
            if coordinated and not is_denied:
                joined_letter = patterns.letter_in(coordinated) or coordinated["spaced"]
                if self.options.letter(joined_letter) not in (None, letter):
                    return claim(None, False)
            is_subject = re.match(r"\s+(?:is|are|was)\s+what\b", tail) is not None
            if is_subject or match["verb"] and re.match(r"\s+(?:is|are|was)\b", tail):
                return claim(None, False)
            if re.match(rf"{patterns.MARKS}\s*(?:if|unless)\b", tail, re.IGNORECASE):
                return None
            return claim(letter, is_denied)
        letter_match = None
        option_letter = self._of_clause(sentence)
        if option_letter is not None:
            return claim(option_letter, is_denied)
        is_verb = match["verb"] is not None or re.search(r"[:=]\s*$", match[0]) is not None
        if not is_verb or not sentence or patterns.REMARK.match(sentence) or is_denied:
            return None
        return claim(None, False)

    def _ends_here(self, letter: str, letter_match: re.Match[str], tail: str) -> bool:
        """Return whether a letter is no article, and has no other option's text beside it."""
        tail = re.sub(r"^[*_$\"'“”‘’`}]+", "", tail)
        if re.match(r"\s+[^\W\d_]", tail) and not re.match(
            rf"\s+(?:{patterns.CONNECTORS}\b|[A-Z](?!\w))", tail
        ):
            following = tail.strip()
            return self._of_clause(following) == letter
        if re.match(r"\s+\.?\d", tail):
            return self._of_clause(tail.strip()) == letter
        if bracketed := re.match(r"\s*\(([^()]*)\)", tail):
            return self.options.of_text(bracketed[1]) in (None, letter)
        if punctuated := re.match(r"\s*[.):,]\s*|\s+[-–—]\s+", tail):
            option_letter = self._of_clause(tail[punctuated.end() :])
            return option_letter in (None, letter)
        return True

    def _of_clause(self, sentence: str) -> str | None:
        """Return the option whose text is the first clause, or clauses, of a sentence."""
        sentence = sentence.strip()
        ends = [len(sentence), *(match.start() for match in patterns.CLAUSE_END.finditer(sentence))]
        for end in ends:
            clause = sentence[:end]
            if (letter := self.options.of_text(clause)) is not None:
                is_coordinated = re.match(r"\s*,?\s*(?:or|and)\b", sentence[end:], re.IGNORECASE)
                return None if is_coordinated else letter
        return None

    def _mentioned(self, text: str) -> str | None:
        """Return the only option that is mentioned, as "(B)" or "option B", and not denied.

        Return None if there are several.
        """
        letters: set[str] = set()
        for sentence in re.split(r"(?<=[.!?;…])\s|\n", text):
            matches = list(patterns.MENTION.finditer(sentence))
            if sentence.rstrip().endswith("?"):
                continue
            for number, match in enumerate(matches):
                start = matches[number - 1].end() if number else 0
                end = matches[number + 1].start() if number + 1 < len(matches) else len(sentence)
                letter = self.options.letter(patterns.letter_in(match) or match["only"])
                denial = patterns.DENIED_BEFORE.search(sentence[start : match.start()])
                # A denial right before the next letter is about that letter.
                denial = denial or patterns.DENIED.search(
                    patterns.DENIED_BEFORE.sub("", sentence[match.end() : end])
                )
                denial = denial or (
                    patterns.DENIED.search(sentence[: match.start()]) if not number else None
                )
                if letter is not None and not denial:
                    letters.add(letter)
        return letters.pop() if len(letters) == 1 else None
