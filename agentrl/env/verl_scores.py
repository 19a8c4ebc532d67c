"""Scores by the rows' `data_source`, for datasets prepared by verl: GSM8K, MATH, DAPO math, Search-R1.

They take the arguments of verl's `compute_score` and follow the same rules: GSM8K by the number behind `####`,
MATH by the last `\\boxed{...}`, DAPO by the last line `Answer: ...` (1 or -1), Search-R1 by a match in `<answer>`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

_GSM8K = re.compile(r"#### (-?[0-9.,]+)")
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAIL = 300


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The score of a solution.

    Raises:
        ValueError: the source has no score.
    """
    for names, score in _SCORES:
        if data_source in names or data_source.startswith(tuple(n[:-1] for n in names if n.endswith("*"))):
            return score(solution_str, ground_truth)
    known = ", ".join(name for names, _ in _SCORES for name in names)
    raise ValueError(
        f"no score for the data_source {data_source!r} (there are: {known}): name a function of your own under "
        "env.options.reward"
    )


def gsm8k(solution: str, truth: Any) -> float:
    """1 if the last number after `####` is correct."""
    found = _GSM8K.findall(solution[-_TAIL:])
    return float(bool(found) and _number(found[-1]) == _number(str(truth)))


def _number(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip().rstrip(".")


def math(solution: str, truth: Any) -> float:
    """1 if the last `\\boxed` contains the correct answer in any notation."""
    found = last_boxed(solution)
    return float(found is not None and normal_form(found) == normal_form(str(truth)))


def dapo(solution: str, truth: Any) -> float:
    """1 if the last line `Answer: ...` is correct, else -1."""
    found = _ANSWER_LINE.findall(solution[-_TAIL:])
    answer = (last_boxed(found[-1]) or found[-1]) if found else None
    right = answer is not None and normal_form(answer) == normal_form(last_boxed(str(truth)) or str(truth))
    return 1.0 if right else -1.0


def search(solution: str, truth: Any) -> float:
    """1 if the last `<answer>` matches a correct one, ignoring case, articles and punctuation."""
    found = _ANSWER_TAG.findall(solution)
    targets = truth.get("target", ()) if isinstance(truth, Mapping) else truth
    wanted = {_plain(str(t)) for t in ([targets] if isinstance(targets, str) else targets)}
    return float(bool(found) and _plain(found[-1]) in wanted)


def _plain(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` (or `\\fbox{...}`, or `\\boxed x`), or None."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("boxed" if text.startswith("\\boxed", start) else "fbox", 1)[1]
    if rest.startswith(" "):
        return rest[1:].split("$")[0].strip()
    depth = 0
    for place, c in enumerate(rest):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[1:place] if c == "}" else None
    return None


def normal_form(answer: str) -> str:
    """A mathematical answer in normalized notation: without units, spaces and command variants."""
    text = answer.strip().rstrip(".").replace("\n", "")
    for old, new in _SAME:
        text = text.replace(old, new)
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\{([^}]*)\}", lambda m: m[1] if m.start() == 0 else "", text)
    text = re.sub(r"(?<![\d])\.(\d)", r"0.\1", text)
    if text.count("=") == 1 and len(text.split("=")[0].strip()) <= 2:
        text = text.split("=")[1]
    text = re.sub(r"\\sqrt(?!\{)\s*(\w)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac(?!\{)(\w)(?:\{(\w+)\}|(\w))", lambda m: f"\\frac{{{m[1]}}}{{{m[2] or m[3]}}}", text)
    text = re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
    if re.fullmatch(r"-?[\d,]+(\.\d+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text)
    return r"\frac{1}{2}" if text == "0.5" else text  # the one decimal fraction that verl takes for another


_SAME = (
    *(
        ("\\!", ""),
        ("\\,", ""),
        ("\\ ", " "),
        ("\\left", ""),
        ("\\right", ""),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
    ),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""), ("$", ""), ("\\%", ""), ("%", ""), ("\\\\", "\\")),
)
_SCORES: tuple[tuple[tuple[str, ...], Callable[[str, Any], float]], ...] = (
    (("openai/gsm8k",), gsm8k),
    (("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math),
    (("math_dapo", "math", "aime*"), dapo),
    (("searchR1_*",), search),
)
