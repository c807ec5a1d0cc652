"""The wording by which a response names, announces, denies or takes back an option.

A letter is upper case or in brackets, and no word or formula goes on from it: "a triangle" is no A,
nor is A', A4 or A = 3.
"""

import re

DENIAL = (
    r"(?:not|never|n['’]t|cannot|neither|nor|no|incorrect|wrong|false|invalid|impossible|"
    r"ruled\s+out|eliminated?|excluded?|excluding|rejected?|discard(?:ed)?|unlikely|"
    r"rather\s+than|instead\s+of|except|opposite)"
)
#: Emphasis, quotes, dollar signs and spaces around a letter.
MARKS = r"[*_$\"'“”‘’`\s]{0,8}"
#: The end of a letter: nothing follows that would make it a word or a formula.
ENDS = r"(?![\w'’′^]|\s{0,2}[=+/<>|×÷√°%^]|-\w|\s{0,2}[-−]\s{0,2}\d)"
#: The letter of an option: in brackets or quotes, or upper case alone.
LETTER = (
    r"(?:[(\[{]\s{0,3}(?P<inner>[A-Za-z])\s{0,3}[)\]}]|[\"'“‘`](?P<quoted>(?-i:[A-Z]))[\"'”’`]|"
    rf"(?P<bare>(?-i:[A-Z]))\)?{ENDS})"
)
#: A letter and nothing else.
ALONE = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?\s*[.:,)]?")
#: A letter, and the text of its line: "B. circle". Groups 1 and 2 are the letter, group 3 the text.
LED = re.compile(
    r"(?:[(\[{]\s*([A-Za-z])\s*[)\]}]\s*[.:,-]?|([A-Z])\s*(?:[).:,]|\s[-–—])(?=\s))\s*(\S.*)"
)
#: A letter with its kind: "option B", "the correct answer: B".
NAMED = re.compile(
    r"(?:the\s+)?(?:correct\s+|right\s+)?(?:option|choice|answer|letter)\s*[:=]?\s*"
    rf"{MARKS}{LETTER}",
    re.IGNORECASE,
)
#: Words that may follow a letter which is not an article: "the answer is A because …".
CONNECTORS = (
    r"(?:because|since|as|so|for|due|given|which|where|while|whereas|with|by|based|from|in|on|"
    r"here|too|and|or|but|not|is|are|therefore|thus|hence|then|if|unless|rather|instead|"
    r"according|when|that)"
)
#: Words that announce an answer, up to the option: "the answer to this question is", "I choose".
#: `qualifier` makes it hypothetical or denies it.
ANNOUNCEMENT = re.compile(
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
VERDICT = re.compile(
    rf"(?<![\w'’]){MARKS}{LETTER}{MARKS}(?:\s*:)?\s*"
    r"(?:is|are|was|looks|seems|must\s+be|can(?:not)?\b|does|do|has|would)"
    rf"(?P<predicate>[^.\n!?;]{{0,60}})"
)
#: The predicate of a sentence that calls a letter correct.
CORRECT = re.compile(
    r"^\s*(?:clearly\s+|therefore\s+|thus\s+|the\s+|most\s+|only\s+)*"
    r"(?:correct|right|best|true|answer)\b",
    re.IGNORECASE,
)
#: Another letter that is joined to the one before: "B or C", "B, C", "B C".
COORDINATED = re.compile(
    rf"{MARKS}\(?\s*(?:,|/|&|\+|;|\||\\|…|[-–—.](?=[A-Z])|"
    r"\b(?:or|and|and/or|to|through|versus|vs)\b)\s*"
    r"(?:(?:or|and|no|either|possibly|maybe|perhaps|option|choice|mean|i)\b,?\s*)*"
    rf"{MARKS}{LETTER}"
    r"(?!\s+(?:is|are|was|has|does|do|would|looks|seems|cannot|can)\b)"
    r"|[ \t]+(?P<spaced>[A-Z])(?![\w'’]|\s+(?:is|are|was|has|does|would|cannot|can)\b)"
)
#: A letter that is mentioned as an option, without any claim: "option B", "(B)".
MENTION = re.compile(
    rf"(?:\b(?:option|choice|answer)\s+{MARKS}{LETTER})|[(\[](?P<only>[A-Za-z])[)\]]",
    re.IGNORECASE,
)
DENIED = re.compile(rf"\b{DENIAL}\b|n['’]t\b", re.IGNORECASE)
#: A denial of the letter that follows it.
DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|neither|nor|except|excluding|rather\s+than|instead\s+of|all\s+but|"
    r"eliminate|exclude|reject|discard|rule\s+out|cannot\s+be|if|whether|unless)|n['’]t(?:\s+be)?)"
    r"\s+(?:\w+\s+)?$",
    re.IGNORECASE,
)
#: Words before an announcement that make it no claim: "I doubt that", "it is false that".
DOUBT = re.compile(
    rf"\b(?:{DENIAL}|nobody|none|doubt\w*|some|others|people|avoid|unclear|unsure|maybe|"
    r"perhaps|might|could|worst|least|second|other|another|first|initially|before|if|whether|"
    r"unless|suppose|assume|claim)\b|n['’]t\b",
    re.IGNORECASE,
)
#: Words that take back the answer before them: "no, wait", "scratch that", "which is wrong".
RETRACTION = re.compile(
    r"(?:^|[\s.,;(])(?:no\s*[,.;:!]|wait\b|actually\b|correction\b|sorry\b|scratch\s+that|"
    r"(?:just\s+)?kidding\b|i\s+meant?\b|on\s+second\s+thought|"
    r"\(\s*(?:not|no|wrong|incorrect|false)\b)|"
    r"^[^.\n]{0,60}?\b(?:which|that|it|this)\s+(?:is|was)\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|true))\b",
    re.IGNORECASE,
)
#: A letter that is joined to the announcement or letter after it: "A or".
JOINED = re.compile(rf"{LETTER}\s*(?:,|/|&|\bor\b|\band\b)\s*{MARKS}(?:or\s+|and\s+)?$")
#: A sentence that states a letter: "so B", "it is B".
SPOKEN = re.compile(
    r"(?:(?:(?:so|therefore|thus|hence)\b,?\s*)?(?:it|this|that)\s*(?:is|['’]s)\s+"
    r"|(?:so|therefore|thus|hence)\b,?\s+)"
    rf"{MARKS}{LETTER}{MARKS}[.!]?",
    re.IGNORECASE,
)
#: A letter and its reason: "B because …".
REASONED = re.compile(rf"{LETTER}{MARKS},?\s*(?:because|since)\b(?P<reason>.*)", re.IGNORECASE)
#: Words before an option's text: "Based on the picture, it is", "So the shape in the middle is".
LEAD_IN = re.compile(
    r"(?:(?:based|in|from|according|looking)\b[^,.;]{0,40},\s*)?"
    r"(?:(?:so|thus|therefore|hence|then)\b,?\s*)?"
    r"(?:it|this|that|(?:the|this|that)\s+\w+(?:\s+\w+)?"
    r"(?:\s+(?:in|of|on|at)\s+(?:the|this)\s+\w+)?)\s*(?:['’]s|is|are|was)\s+",
    re.IGNORECASE,
)
#: Words between an announcement and its option: "the answer is clearly option B".
FILLERS = re.compile(
    r"^(?:(?:option|choice|letter|answer|definitely|clearly|therefore|thus|indeed)\b[,:]?\s*)+",
    re.IGNORECASE,
)
#: Places where an option's text may end within a sentence.
CLAUSE_END = re.compile(
    rf"[.!;](?=\s|$)|\s[-–—(]|[,:]?\s+(?:{CONNECTORS})\b|,\s+(?={CONNECTORS}\b)", re.IGNORECASE
)
#: The start of a remark on an answer that stands elsewhere: "the answer is clear", "… is below".
REMARK = re.compile(
    r"(?:clear|obvious|simple|correct|right|unique|consistent|supported|confirmed|based|given|"
    r"found|determined|obtained|shown|therefore|below|above|as\s+follows)\b",
    re.IGNORECASE,
)


def letter_in(match: re.Match[str]) -> str:
    """Return the letter in a match of a pattern with `LETTER`; "" without."""
    return match["inner"] or match["quoted"] or match["bare"] or ""


def clause_before(text: str, start: int) -> str:
    """Return the part of a clause before the position `start`, at most 100 characters."""
    clauses = re.split(
        r"[.\n!?;:,…]|\b(?:so|therefore|thus|hence|but|then)\b", text[max(0, start - 100) : start]
    )
    return clauses[-1]
