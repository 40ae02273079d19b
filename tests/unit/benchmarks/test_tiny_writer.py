"""The tiny writer is taught with the environment's own prompts, and no style above others."""

import random
from collections import Counter

from benchmarks.tiny_writer import SHOWN, conversation
from envs.writing_judge import style_of


def test_a_conversation_is_the_environments_prompt_and_a_line_of_its_pool() -> None:
    rng = random.Random(1)
    styles: Counter[str | None] = Counter()
    for _ in range(400):
        messages = conversation(rng, SHOWN)
        assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * (len(messages) // 2)
        assert messages[0]["content"].startswith("Write one short line")
        style = style_of(messages[-1]["content"])
        styles[style] += 1
        assert style is not None
        assert style in messages[0]["content"]
    assert len(styles) == 4
    # 100 of each are expected; a pool holds three of the four
    assert all(60 < count < 140 for count in styles.values())


def test_no_line_need_be_shown() -> None:
    assert [message["role"] for message in conversation(random.Random(1), 0)] == ["system", "user", "assistant"]
