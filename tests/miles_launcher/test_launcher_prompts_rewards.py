"""JSONL prompts and rewards: what is read, and that every complaint names its place."""

from __future__ import annotations

import fractions
import math
from pathlib import Path
from typing import Any

import pytest

from miles_launcher.prompts import read_prompts
from miles_launcher.rewards import Reward, RewardError, RewardSample, load_reward, score
from miles_launcher.tasks import TASKS, lowercase_share


def sample(response: str, **changes: Any) -> RewardSample:
    fields: dict[str, Any] = {
        "prompt": "say",
        "prompt_ids": tuple(b"say"),
        "response": response,
        "response_ids": tuple(response.encode()),
    }
    return RewardSample(**{**fields, **changes})


def test_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        '{"prompt": "h\u00e9", "label": 7, "difficulty": "easy"}\r\n'
        "\n"
        '{"prompt_ids": [0, 5], "answer": "x"}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}'.encode()
    )
    text, ids, chat = read_prompts(path)
    assert (text.text, text.label, text.metadata) == ("h\u00e9", 7, {"difficulty": "easy"})
    assert (ids.ids, ids.label, ids.text, ids.needs_tokenizer) == ((0, 5), "x", None, False)
    assert chat.messages == ({"role": "user", "content": "hi"},) and chat.needs_tokenizer
    assert chat.source == f"{path}, line 4"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"prompt": "x"', "not JSON: .* at column"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'["x"]', "expected an object, got list"),
        (b'{"promt": "x"}', r"give exactly one of prompt, .*; found \['promt'\]"),
        (b'{"prompt": "x", "prompt_ids": [1]}', "give exactly one of"),
        (b'{"prompt": ""}', "prompt must be a non-empty string, got ''"),
        (b'{"prompt": 3}', "prompt must be a non-empty string, got 3"),
        (b'{"prompt_ids": []}', "prompt_ids must be a non-empty list"),
        (b'{"prompt_ids": [1, true]}', r"prompt_ids\[1\]=True is not a token id"),
        (b'{"prompt_ids": [1, -2]}', r"prompt_ids\[1\]=-2 is not a token id"),
        (b'{"prompt_ids": [1.0]}', r"prompt_ids\[0\]=1.0 is not a token id"),
        (b'{"messages": []}', "messages must be a non-empty list"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\] must have role and content"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "must be strings"),
        (b'{"prompt": "x", "label": 1, "answer": 2}', "label or answer, not both"),
    ],
)
def test_broken_line_names_file_and_line(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl, line 3: .*{complaint}"):
        read_prompts(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n  \n")
    with pytest.raises(ValueError, match="p.jsonl: no prompts in this file"):
        read_prompts(path)


def test_builtin_task_is_deterministic_and_varied() -> None:
    task = TASKS["lowercase"]
    assert len({prompt.text for prompt in task.prompts}) == len(task.prompts) == 26
    assert len({len(prompt.text or "") for prompt in task.prompts}) > 4
    assert load_reward("builtin:lowercase") is task.reward


def test_lowercase_share() -> None:
    cases = {"abcd": 1.0, "abCD": 0.5, "": 0.0, "1234": 0.0, "\u00e9\u00e9ab": 2 / 6}
    assert score(lowercase_share, [sample(text) for text in cases]) == list(cases.values())
    # Tokens without text count as misses; many characters a token do not count twice.
    assert lowercase_share([sample("ab", response_ids=(97, 98, 300, 301))]) == [0.5]
    assert lowercase_share([sample("abcd", response_ids=(9,))]) == [1.0]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([0.5, math.nan], "returned nan for sample 1 .*prompt 'say', response 'two'"),
        ([math.inf, 0.0], "returned inf for sample 0"),
        ([1.0], "returned 1 values for 2 samples"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 samples"),
        ([1.0, "2"], r"returned '2' \(str\), not a number, for sample 1"),
        ([None, 1.0], "returned None .*for sample 0"),
        (0.5, "returned float, expected a list of 2 numbers"),
        (None, "returned NoneType"),
    ],
)
def test_bad_reward_values(values: Any, complaint: str) -> None:
    with pytest.raises(RewardError, match=complaint):
        score(lambda samples: values, [sample("one"), sample("two")])


def test_numbers_of_any_kind_become_floats() -> None:
    import numpy

    values: Any = [True, 3, numpy.float32(0.5), fractions.Fraction(1, 4)]
    scored = score(lambda samples: values, [sample("x")] * 4)
    assert scored == [1.0, 3.0, 0.5, 0.25] and all(type(value) is float for value in scored)


def test_raising_reward_names_the_sample() -> None:
    def picky(samples: list[RewardSample]) -> list[float]:
        return [1.0 / len(s.response) for s in samples]

    with pytest.raises(RewardError, match="raised ZeroDivisionError.* for sample 1") as caught:
        score(picky, [sample("ok"), sample("")])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def together(samples: list[RewardSample]) -> list[float]:
        if len(samples) > 1:
            raise RuntimeError("batch")
        return [0.0]

    with pytest.raises(RewardError, match="on the 2 samples together, though on none alone"):
        score(together, [sample("a"), sample("b")])


def test_reward_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launcher_test_reward.py").write_text(
        "def count(samples):\n    return [float(len(s.response_ids)) for s in samples]\n"
        "not_a_function = 3\n"
    )
    (tmp_path / "launcher_test_broken.py").write_text("import does_not_exist_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    reward: Reward = load_reward("launcher_test_reward:count")
    assert score(reward, [sample("abc")]) == [3.0]
    for spec, complaint in (
        ("launcher_test_reward:nope", "has no function nope"),
        ("launcher_test_reward:not_a_function", "has no function not_a_function"),
        ("launcher_test_absent:f", "importing launcher_test_absent failed: ModuleNotFoundError"),
        ("launcher_test_broken:f", "importing launcher_test_broken failed"),
        ("no colon", "write module:function"),
    ):
        with pytest.raises(ValueError, match=complaint):
            load_reward(spec)
