r"""The unit after or before an answer's value: `12 square inches`, `9.8 m/s^2`, `€12`, `5 apples`.

A unit is one canonical text, so two spellings of a unit are equal texts: `km/h`, `kph` and
`kilometers per hour` are all `h^-1 km`. Units are compared and never converted. The case of a
symbol counts: mW is no MW.
"""

import re

#: Unit → its spellings, separated by spaces.
_SPELLINGS = {
    "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "m": "m meter metre", "dm": "dm decimeter decimetre",
    "µm": "µm um micrometer micron", "nm": "nm nanometer", "ft": "ft feet foot", "inch": "in inch",
    "yd": "yd yard", "mi": "mi mile", "degree": "deg degree", "rad": "rad radian",
    "celsius": "celsius", "fahrenheit": "fahrenheit", "h": "h hr hour", "min": "min minute",
    "s": "s sec second", "ms": "ms millisecond", "day": "day", "week": "week", "month": "month",
    "year": "yr year", "dollar": "$ dollar USD", "cent": "cent ¢", "euro": "€ euro EUR",
    "pound sterling": "£ GBP", "yen": "¥ yen yuan", "rupee": "₹ rupee", "kg": "kg kilogram",
    "g": "g gram", "mg": "mg milligram", "lb": "lb pound", "oz": "oz ounce", "t": "ton tonne",
    "L": "L l liter litre", "mL": "mL ml milliliter millilitre", "cL": "cL cl", "gal": "gal gallon",
    "N": "N newton", "kN": "kN kilonewton", "J": "J joule", "kJ": "kJ kilojoule", "MJ": "MJ",
    "W": "W watt", "kW": "kW kilowatt", "MW": "MW megawatt", "mW": "mW milliwatt", "kWh": "kWh",
    "V": "V volt", "kV": "kV", "mV": "mV", "A": "A amp ampere", "mA": "mA milliampere",
    "Ω": "Ω ohm", "kΩ": "kΩ kilohm", "F": "F farad", "µF": "µF uF", "C": "C coulomb",
    "Pa": "Pa pascal", "kPa": "kPa", "MPa": "MPa", "atm": "atm", "bar": "bar", "T": "T tesla",
    "Hz": "Hz hertz", "kHz": "kHz", "MHz": "MHz", "K": "K kelvin", "mol": "mol mole", "eV": "eV",
    "cal": "cal calorie", "kcal": "kcal", "acre": "acre", "hectare": "ha hectare",
}  # fmt: skip
_SYMBOLS = {
    spelling: unit
    for unit, spellings in _SPELLINGS.items()
    for spelling in spellings.split()
}  # fmt: skip
#: Spellings of compound units, each with the powers of its units.
_COMPOUNDS = {
    "mph": {"mi": 1, "h": -1},
    "kph": {"km": 1, "h": -1},
    "kmh": {"km": 1, "h": -1},
    "kmph": {"km": 1, "h": -1},
    "mps": {"m": 1, "s": -1},
    "cc": {"cm": 3},
    "sqft": {"ft": 2},
}
_DIMENSIONLESS = {"unit", "units"}
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}

_WORD = r"(?:[A-Za-zµΩ]{1,20}|[$€£¥₹¢])"
_FACTOR = rf"{_WORD}\.?(?: ?\^ ?(?:\{{ ?-?[1-4] ?\}}|-?[1-4]))?"
#: A product or quotient of up to six words, each with a power or without, at the end of an answer.
_TAIL = re.compile(
    rf"(?<![A-Za-z\\µΩ_^]) ?((?:1 ?/ ?)?{_FACTOR}(?:(?: ?(?:/|\\cdot|\\times|\*) ?| ){_FACTOR}){{0,5}})$"
)
_TOKEN = re.compile(rf"(/|\bper\b)|({_WORD})\.?(?: ?\^ ?\{{? ?(-?[1-4]) ?\}}?)?")
_PRODUCT = re.compile(r"\\cdot|\\times|\*")
_QUOTIENT = re.compile(
    r"\\frac ?\{ ?([^{}0-9]{1,20}) ?\} ?\{ ?([A-Za-zµΩ ]{1,20}(?:\^ ?\{?[1-4]\}?)?) ?\}$"
)
_CURRENCY = re.compile(r"([+-]?) ?(?:US ?)?([$€£¥₹]) ?([+-]?)(?=[0-9.\\(])")
_PRIMES = re.compile(r"(?<=[0-9])(?:'{1,2}|\")$")
_TEMPERATURE = re.compile(r" ?\^\\circ ?(C|F|Celsius|Fahrenheit)$")
#: Characters at the end of an answer that may hold a unit.
_MAX_TAIL = 60

#: LaTeX commands of a numeric value, and exponents as in 1e5, whose letters are no variables.
_COMMANDS = re.compile(
    r"\\(?:frac|sqrt|pi|times|cdot|pm|mp|log|ln|overline|infty)(?![a-zA-Z])|[0-9.][eE](?=[+-]?[0-9])"
)
_ARGUMENT = re.compile(r"\\(?:sin|cos|tan)(?![a-zA-Z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]*)?) ?\^\\circ ?")
#: Words after a number that change it, deny it or mean another: "5 thousand" is not 5.
_NO_NOUN = frozenset(
    "hundred hundreds thousand thousands thousandth thousandths hundredth hundredths million "
    "millions billion billions trillion trillions dozen dozens gross score couple couples pair "
    "pairs lakh lakhs crore crores tens ten half halves third thirds fourth fourths quarter "
    "quarters fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths "
    "twelfth twelfths percent percentage pct fold times twice double triple factorial squared "
    "cubed square cube root choose mod modulo over under plus minus divided multiplied power "
    "raised pi sqrt sin cos tan log exp or and xor nor not isn is are was were no none never nor "
    "wrong incorrect false impossible undefined more less fewer greater larger smaller than least "
    "most above below between from through until out off per each negative positive remainder but "
    "except without unknown unless maybe perhaps guess approximately about roughly around almost "
    "nearly to of by at in if when where for base infinity inf zero one two three four five six "
    "seven eight nine eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen "
    "twenty thirty forty fifty sixty seventy eighty ninety max min abs gcd lcm true lambda import "
    "exec open print the other another instead actually wait".split()
)


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Return the value and the unit of a normalised answer; None for no unit.

    `12 square inches` → ("12", "inch^2"), `25%` → ("25", "%"), `12 units` → ("12", None).
    """
    if text.isdigit():
        return text, None
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if _ARGUMENT.search(text):  # a trailing degree belongs to the argument
        return _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text), None
    if text.endswith("^\\circ"):
        return text.removesuffix("^\\circ").strip(), "degree"
    if match := _PRIMES.search(text):  # feet and inches, or minutes and seconds
        return text[: match.start()], "double prime" if len(match[0]) > 1 or match[
            0
        ] == '"' else "prime"
    if match := _TEMPERATURE.search(text):
        return text[: match.start()].strip(), "celsius" if match[1][0] == "C" else "fahrenheit"
    if match := _CURRENCY.match(text):
        return match[1] + match[3] + text[match.end() :], _SYMBOLS[match[2]]
    head, tail = text[:-_MAX_TAIL], text[-_MAX_TAIL:]
    match = _TAIL.search(
        _QUOTIENT.sub(lambda quotient: f" {quotient[1].strip()}/{quotient[2].strip()}", tail)
    )
    if match is None:
        return text, None
    tail = match.string
    value, unit_text = (head + tail[: match.start()]).strip(), match[1]
    is_attached = tail[match.start(1) - 1 : match.start(1)] not in (" ", "$")
    if not value or value[-1] in "+-*/=<>,;:(":
        return text, None
    powers = _powers(unit_text)
    # A single letter right behind a value, 6t, may be a factor; behind a space it is a unit.
    is_single = len(unit_text) == 1 and unit_text.isalpha() and unit_text not in "µΩ"
    if (
        powers is not None
        and not (is_attached and is_single)
        and (_is_numeric(value) or not is_single)
    ):
        return value, _canonical(powers)
    # No known unit: words after a number may be things that were counted, as in "5 apples".
    nouns = unit_text.split()
    if not is_attached and _is_numeric(value) and len(nouns) <= 3 and all(map(_is_noun, nouns)):
        return value, " ".join(_singular(noun) for noun in nouns)
    return text, None


def _powers(text: str) -> dict[str, int] | None:
    """Return the power of each unit in a product or quotient; None if one of its words is no unit.

    After the first slash or "per" all units have negative powers.
    """
    powers: dict[str, int] = {}
    sign, next_power = 1, 1  # next_power: of "square" or "cubic" before a unit
    last_unit: str | None = None  # "" stands for "units", which has no dimension
    for slash, word, power_text in _TOKEN.findall(_PRODUCT.sub(" ", text)):
        if slash or word == "per":
            sign = -1
            continue
        word_power = _POWER_WORDS.get(word.lower())
        if word_power and word.lower().endswith("ed"):  # metres squared
            if last_unit is None:
                return None
            powers[last_unit] *= word_power
            continue
        if word_power:
            next_power = word_power
            continue
        factor = _unit(word)
        if factor is None:
            return None
        exponent = sign * next_power * int(power_text or 1)
        next_power, last_unit = 1, None
        for unit, unit_power in factor.items():
            powers[unit] = powers.get(unit, 0) + exponent * unit_power
            last_unit = unit
    return powers if last_unit is not None else None


def _unit(word: str) -> dict[str, int] | None:
    """Return the powers of the units that a word names; None for a word that names no unit.

    "units" has no dimension: its only unit is "".
    """
    if word.lower() in _DIMENSIONLESS:
        return {"": 1}
    if word.lower() in _COMPOUNDS:
        return _COMPOUNDS[word.lower()]
    names = (
        [word] if len(word) < 3 else [word, word.lower(), _singular(word), _singular(word.lower())]
    )
    names += ["lb"] if word == "lbs" else ["h"] if word == "hrs" else []
    return next(({_SYMBOLS[name]: 1} for name in names if name in _SYMBOLS), None)


def _canonical(powers: dict[str, int]) -> str | None:
    """Return the units in alphabetical order with their powers; None if all cancel."""
    factors = sorted((unit, power) for unit, power in powers.items() if power and unit)
    return " ".join(unit if power == 1 else f"{unit}^{power}" for unit, power in factors) or None


def _singular(word: str) -> str:
    """Return a regular English plural's singular; short words and those with -ss stay."""
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 3 and not word.endswith("ss") else word


def _is_noun(word: str) -> bool:
    """Return whether a word after a number may be what was counted."""
    is_word = len(word) >= 3 and word.isalpha() and word[1:].islower()
    return is_word and word.lower() not in _NO_NOUN


def _is_numeric(value: str) -> bool:
    """Return whether a value has no variable, so that a letter after it is a unit."""
    return not re.search("[A-Za-z]", _COMMANDS.sub("", value))
