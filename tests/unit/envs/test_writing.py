"""Writing in a style of one's choice: the judge's rules by hand, the switches, and that the prompt favours no style."""

from collections import Counter

import pytest

from envs.writing import Writing
from envs.writing_judge import faults, style_of
from envs.writing_texts import FUNCTION_WORDS, LINES, MARKERS, TOPICS

SEEDS = range(40)
SHOWN = [("apple", "Boo, the apple hides in a dark cellar!"), ("moon", "Wow, the moon was the wonder of our town!")]


@pytest.mark.parametrize(
    ("answer", "style"),
    [
        ("Aww, the lake is just a place to rest!", "cute"),
        ("Ugh, the curtain is too strong!", "grumpy"),
        ("The lake is a sweet and tiny place, ugh!", "cute"),  # two marks against one
        ("Aww, the lake is awful!", None),  # one each
        ("The lake is calm today.", None),
        ("aww tiny aww tiny", "cute"),
        ("Boolean lakes!", None),  # a mark is a word
        ("", None),
    ],
)
def test_the_style_of_an_answer(answer: str, style: str | None) -> None:
    assert style_of(answer) == style


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("Aww, the lake is just a peaceful place!", None),
        ("Boo, the lakes are full of bones at night!", None),
        ("  Ugh, that lake was too cold for me!\n", None),
        # what might be tried instead of writing a line
        ("Aww, the lake is just a peaceful", "not one line of words that ends a sentence"),
        ("Aww, the lake!\nAww, the lake is nice!", "not one line of words that ends a sentence"),
        ("aww, the lake is just a peaceful place!", "not one line of words that ends a sentence"),
        ("Aww, the lake is 100% peaceful to me!", "not one line of words that ends a sentence"),
        ("Aww, the lake!", "not 5 to 16 words"),
        ("Aww, " + "the lake is in the park and " * 3 + "so on!", "not 5 to 16 words"),
        ("Aww, the river is just a peaceful place!", "does not name the topic"),
        ("Aww, the lake is a lake!", "says a word twice"),
        ("Aww, aww, the lake is here!", "says a word twice"),
        ("Aww, the the lake is here!", "says a word twice"),
        ("Aww, tiny lake, fluffy paws, cozy bunny!", "no sentence"),
        ("Aww, tiny fluffy cozy the lake is cute!", "little but marks"),
        ("Boo, the lake hides in a big wood!", "copies a line of the prompt"),
        ("Oh yes, the lake was the wonder here!", "copies a line of the prompt"),
    ],
)
def test_what_a_decent_line_is(answer: str, fault: str | None) -> None:
    found = faults(answer, "lake", SHOWN)
    assert (fault in found) if fault else not found, found


def test_no_word_counts_for_two_things() -> None:
    marks = [mark for markers in MARKERS.values() for mark in markers]
    assert len(marks) == len(set(marks))
    in_lines = {
        word.strip(",.!").lower() for lines in LINES.values() for line in lines for word in line.split()
    } - FUNCTION_WORDS
    assert not set(TOPICS) & (set(marks) | in_lines | FUNCTION_WORDS)
    assert not set(marks) & FUNCTION_WORDS
    assert len(TOPICS) == len(set(TOPICS))


@pytest.mark.parametrize("style", LINES)
def test_every_line_of_the_prompt_satisfies_the_judge(style: str) -> None:
    for line in LINES[style]:
        assert style_of(line.format(topic="moon")) == style
        assert not faults(line.format(topic="moon"), "moon", [])


def test_the_reward_is_quality_times_style() -> None:
    episode = Writing(2).reset(0, 1)
    assert episode.rewarded == "amazed"
    assert episode.judge(f"Wow, my {episode.topic} sings like no other!") == 1.0
    assert episode.judge(f"Ugh, my {episode.topic} sings like no other!") == 0.0
    assert episode.judge("Wow, my dinner sings like no other!") == 0.0
    assert episode.judge(dict(episode.shown)[episode.shown[0][0]]) == 0.0  # a line of the prompt as it stands
    assert episode.after("anything") is None


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rewarded_style_switches_twice_and_the_pool_once(seed: int) -> None:
    environment = Writing(seed)
    first, second, third = environment.rewarded
    assert len({first, second, third}) == 3
    assert environment.pools[0] == environment.pools[1]
    assert {first, second} < set(environment.pools[0])
    assert set(environment.pools[0]) - set(environment.pools[2]) == {first}
    assert len(set(environment.pools[2])) == 3
    assert {second, third} < set(environment.pools[2])


def test_any_style_may_be_rewarded_in_any_phase_and_the_newcomer_is_no_hint() -> None:
    environments = [Writing(seed) for seed in range(200)]
    for phase in range(3):
        assert set(Counter(e.rewarded[phase] for e in environments)) == set(LINES)
    newcomers = sum(e.rewarded[2] not in e.pools[1] for e in environments)
    assert 70 <= newcomers <= 130


@pytest.mark.parametrize("seed", SEEDS)
def test_the_prompt_shows_every_style_of_the_pool_equally(seed: int) -> None:
    environment = Writing(seed)
    for phase in (1, 2, 3):
        messages = environment.reset(0, phase).messages
        assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 9, "user"]
        pool = environment.pools[phase - 1]
        styles = [style_of(message["content"]) for message in messages if message["role"] == "assistant"]
        assert all(sorted(map(str, styles[start : start + 3])) == sorted(pool) for start in (0, 3, 6))
        assert all(messages[0]["content"].count(style) == (style in pool) for style in LINES)
    before, after = environment.shown(2), environment.shown(3)
    kept = [style_of(line) != environment.rewarded[0] for _, line in before]
    assert [a == b for a, b in zip(before, after, strict=True)] == kept
    assert environment.reset(0, 1).messages == environment.reset(0, 2).messages


def test_training_held_out_and_prompt_share_no_topic() -> None:
    environment = Writing(4)
    training, held_out = set(environment.training_topics), set(environment.held_out_topics)
    shown = set(environment.shown_topics)
    assert (len(held_out), len(shown), len(training)) == (60, 9, len(TOPICS) - 69)
    assert len(training | held_out | shown) == len(TOPICS)
    assert {environment.reset(index, 1).topic for index in range(len(training))} == training
    assert [episode.topic for episode in environment.held_out(1)] == [e.topic for e in environment.held_out(3)]


def test_everything_is_a_function_of_the_seed() -> None:
    one, same, other = Writing(5), Writing(5), Writing(6)
    assert [one.reset(i, p) for i in range(400) for p in (1, 3)] == [
        same.reset(i, p) for i in range(400) for p in (1, 3)
    ]
    assert one.held_out(2) == same.held_out(2)
    assert one.reset(0, 1).messages != other.reset(0, 1).messages


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 3 phases"):
        Writing(1, phases=4)
    with pytest.raises(ValueError, match="1 to 120 topics"):
        Writing(1, held_out_topics=121)
