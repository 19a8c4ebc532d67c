import pytest

from agentrl.env.verl import is_compute_score
from agentrl.env.verl_scores import compute_score, last_boxed, normal_form

MATH, SEARCH = "DigitalLearningGmbH/MATH-lighteval", "searchR1_nq"


@pytest.mark.parametrize(
    ("source", "solution", "truth", "score"),
    [
        ("openai/gsm8k", "5 * 2 = 10\n#### 1,000", "1000", 1.0),
        ("openai/gsm8k", "#### 7\nno, #### 8.", "8", 1.0),
        ("openai/gsm8k", "the answer is 8", "8", 0.0),
        ("openai/gsm8k", "#### 8 " + "x" * 300, "8", 0.0),  # only the end of the solution is read
        (MATH, r"so \boxed{\frac{1}{2}}", r"\dfrac12", 1.0),
        (MATH, r"\boxed{1} then \boxed{\left( 3, 4 \right)}", "(3,4)", 1.0),
        (MATH, r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (MATH, r"\boxed{2", "2", 0.0),
        (MATH, "2", "2", 0.0),
        ("math_dapo", "thinking\nAnswer: 34", "34", 1.0),
        ("aime2024", r"Answer: $\boxed{34}$", "34", 1.0),
        ("math_dapo", "34", "34", -1.0),
        (SEARCH, "<answer>The Eiffel Tower.</answer>", {"target": ["Louvre", "eiffel tower"]}, 1.0),
        (SEARCH, "<answer>Louvre</answer><answer>Rome</answer>", {"target": "Louvre"}, 0.0),
    ],
)
def test_a_source_has_its_score(source, solution, truth, score):
    assert compute_score(source, solution, truth) == score


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 5", "5"),
        (".5", "0.5"),
        ("0.5", r"\dfrac12"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("3/4", r"\frac{3}{4}"),
        (r"90^\circ", "90"),
        ("50\\%", "50"),
        ("1,234", "1234"),
        (r"5\text{ cm}", "5"),
        (r"\text{yes}", "yes"),
        ("12.", "12"),
    ],
)
def test_ways_of_writing_an_answer(one, other):
    assert normal_form(one) == normal_form(other)


def test_boxes_nest_and_an_unknown_source_is_named():
    assert last_boxed(r"\boxed{a{b}c} and \fbox{d}") == "d"
    assert last_boxed("none") is None
    assert is_compute_score(compute_score)
    with pytest.raises(ValueError, match="no score for the data_source 'mine'"):
        compute_score("mine", "x", "x")
