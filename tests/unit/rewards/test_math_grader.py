"""The box that counts, real answers, and what holds for every number and every text."""

from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlinf_vl.rewards import grade_math, math_verdict
from rlinf_vl.rewards.latex import last_boxed

WHOLE = st.integers(1, 10**6)
FRACTIONS = st.builds(Fraction, st.integers(1, 9999), st.integers(1, 9999))
SYNTAX = r"\frac \sqrt{ } { ( ) [ ] \boxed{ \text{ ^ _ = , . % $ \pm \pi \circ 1 2 7 x m cm or 9^{9^9} \left \{ √ ° － \\".split(
    " "
)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{6}", True),
        (r"\boxed{5} no, wait: \boxed{6}", True),
        (r"\boxed{6} no, wait: \boxed{5}", False),
        (r"\boxed{6} or perhaps \boxed{", False),
        (r"\boxed{6} or perhaps \boxed{5", False),
        (r"\boxed{6} or perhaps \boxed{}", False),
        (r"\boxed{6} and then 7", True),
        (r"\boxed{{6}}", True),
        (r"\boxed{ \boxed{6} }", True),
        (r"\boxed {6}", True),
        ("\\boxed{\n6\n}", True),
        (r"\boxed{x = \text{6}}", True),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed{\text{}}", False),
        (r"\boxed", False),
        (r"\boxed 6", False),
        (r"\boxed{6", False),
        (r"\boxed{\{6}", False),
        (r"\boxed{6\}", False),
        (r"boxed{6}", False),
        (r"\fbox{6}", False),
        ("6", False),
        ("The answer is 6.", False),
        ("", False),
    ],
)
def test_only_the_last_balanced_box_counts(response: str, right: bool) -> None:
    assert math_verdict(response, "6") is right


def test_an_answer_in_a_broken_box_is_nobodys() -> None:
    assert not math_verdict(r"\boxed{6}", r"\boxed{6")
    assert not math_verdict(r"\boxed{6}", "")


def test_escaped_braces_do_not_close_the_box() -> None:
    assert last_boxed(r"\boxed{\{1, 2\}}", 100) == r"\{1, 2\}"


def test_a_box_of_the_greatest_length_is_read_and_a_longer_one_is_not() -> None:
    assert last_boxed(r"\boxed{" + "6" * 100 + "}", 100) == "6" * 100
    assert last_boxed(r"\boxed{" + "6" * 101 + "}", 100) is None


def test_every_real_answer_is_itself_and_no_other_number(geo3k_dir: Path) -> None:
    tables = [
        pq.read_table(geo3k_dir / f"{split}.parquet", columns=["answer"])
        for split in ("train", "test")
    ]
    answers = [answer for table in tables for answer in table["answer"].to_pylist()]
    assert len(answers) >= 401
    for answer, other in zip(answers, answers[1:] + answers[:1], strict=True):
        number = answer.removeprefix(r"\boxed{").removesuffix("}")
        assert math_verdict(answer, answer), answer
        for box in (
            number,
            f"x = {number}",
            rf"{number}^\circ",
            rf"{number}\text{{ cm}}",
            f"{number}0" * ("." in number),
        ):
            assert not box or math_verdict(rf"so $\boxed{{{box}}}$.", answer), (box, answer)
        if abs(
            float(number) - float(other.removeprefix(r"\boxed{").removesuffix("}"))
        ) > 0.02 * abs(float(number)):
            assert not math_verdict(other, answer), (other, answer)
        unit = 10.0 ** -len(number.partition(".")[2])
        for factor in (7, 100, 0.01, -1, 1.01, 0.99) if float(number) else ():
            if abs(factor - 1) * abs(float(number)) <= unit / 2 and "." in number:
                continue  # within the reference's own rounding
            assert not math_verdict(rf"\boxed{{{float(number) * factor:.10g}}}", answer), (
                answer,
                factor,
            )


@given(WHOLE, WHOLE, st.integers(2, 999))
def test_a_fraction_is_itself_unreduced(over: int, under: int, factor: int) -> None:
    unreduced = rf"\frac{{{over * factor}}}{{{under * factor}}}"
    assert math_verdict(rf"\boxed{{{unreduced}}}", rf"\frac{{{over}}}{{{under}}}")
    assert math_verdict(rf"\boxed{{{over * factor}/{under * factor}}}", unreduced)
    assert not math_verdict(rf"\boxed{{{unreduced}}}", rf"\frac{{{over + under}}}{{{under}}}")


@given(FRACTIONS, st.integers(3, 8))
def test_a_decimal_of_three_significant_digits_is_right(value: Fraction, digits: int) -> None:
    decimal = _rounded(value, digits)
    assume("." in decimal)
    assert math_verdict(
        rf"\boxed{{{decimal}}}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    )
    assert math_verdict(rf"\boxed{{\frac{{{value.numerator}}}{{{value.denominator}}}}}", decimal)


@given(FRACTIONS, st.integers(3, 8), st.sampled_from([Fraction(101, 100), Fraction(99, 100)]))
def test_what_is_one_per_cent_off_is_wrong(value: Fraction, digits: int, factor: Fraction) -> None:
    fraction = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    decimal = _rounded(value, digits)
    assert not math_verdict(rf"\boxed{{{_rounded(value * factor, 9)}}}", fraction)
    assert not math_verdict(rf"\boxed{{{_rounded(Fraction(decimal) * factor, 9)}}}", decimal)


@given(FRACTIONS, st.integers(2, 8), st.sampled_from([-1, 1]))
def test_a_decimal_reference_stands_for_half_a_unit_of_its_last_place(
    value: Fraction, digits: int, sign: int
) -> None:
    decimal = _rounded(value, digits)
    assume("." in decimal)
    unit = Fraction(1, 10 ** len(decimal.partition(".")[2]))
    for error, right in (
        (Fraction(0), True),
        (unit * 49 / 100, True),
        (unit / 2, True),
        (unit * 51 / 100, False),
        (unit, False),
    ):
        number = Fraction(decimal) + sign * error
        response = rf"\frac{{{number.numerator}}}{{{number.denominator}}}"
        assert math_verdict(rf"\boxed{{{response}}}", decimal) is right, (response, decimal)


@given(WHOLE, st.sampled_from([-4, -3, -2, -1, 1, 2, 3, 4]))
def test_no_power_of_ten_is_forgiven(number: int, power: int) -> None:
    assert not math_verdict(
        rf"\boxed{{{_rounded(number * Fraction(10) ** power, 9)}}}", str(number)
    )
    assert not math_verdict(rf"\boxed{{{number}}}", _rounded(number * Fraction(10) ** power, 9))


@given(st.lists(WHOLE, min_size=1), st.text(alphabet="abc 1{\n"))
def test_the_last_box_wins(numbers: list[int], between: str) -> None:
    response = between.join(rf"\boxed{{{number}}}" for number in numbers) + " 12"
    assert math_verdict(response, str(numbers[-1]))
    assert not math_verdict(response, str(numbers[-1] + 1))


@given(
    st.integers(-(10**6), 10**6),
    st.sampled_from(
        [
            r"{}^\circ",
            r"{}^{{\circ}}",
            "{}°",
            "{} degrees",
            "{} cm",
            r"{}\text{{ cm}}^2",
            "x = {}",
            "AB={}",
            r"m\angle A={}",
        ]
        + [
            r"\text{{Area}} = {} \text{{ square units}}",
            r"\,{}\ ",
            "${}$",
            "{}.",
            "{}.0",
            "{:,}",
            r"\frac{{{}}}{{1}}",
        ]
    ),
)
def test_dressing_changes_no_integer(number: int, dress: str) -> None:
    assert math_verdict(rf"\boxed{{{dress.format(number)}}}", str(number))
    assert math_verdict(rf"\boxed{{{number}}}", dress.format(number))
    assert not math_verdict(
        rf"\boxed{{{dress.format(number + abs(number) // 100 + 1)}}}", str(number)
    )


@pytest.mark.slow
@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_any_text_gets_a_verdict(text: str, answer: str) -> None:
    assert grade_math(text, answer) is False
    grade_math(rf"\boxed{{{text}}}", answer)
    grade_math(rf"\boxed{{{answer}}}", "6")


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(SYNTAX), max_size=12).map("".join),
    st.lists(st.sampled_from(SYNTAX), max_size=6).map("".join),
)
def test_any_heap_of_syntax_gets_a_verdict(text: str, answer: str) -> None:
    assert grade_math(rf"\boxed{{{text}}}", answer) in (True, False)


def _rounded(value: Fraction, digits: int) -> str:
    """A positive number in decimal, rounded to so many significant digits, without an exponent."""
    places = digits - 1
    while value * 10**places >= 10**digits:
        places -= 1
    while value * 10**places < 10 ** (digits - 1):
        places += 1
    scaled = round(value * 10**places)
    if places <= 0:
        return str(scaled * 10**-places)
    return f"{scaled // 10**places}.{scaled % 10**places:0{places}}"
