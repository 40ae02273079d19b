import pytest
from tokenizers import Tokenizer

from app.engine.embedded.detokenizer import Detokenizer
from tests.unit.engine.conftest import Files


@pytest.fixture(scope="module")
def tokenizer(files: Files) -> Tokenizer:
    return Tokenizer.from_file(str(files.base / "tokenizer.json"))


def stream(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    """The deltas for `text` token by token, and the stop string that ended it."""
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("the prompt").ids, stop=stop)
    deltas = []
    for token in tokenizer.encode(text).ids:
        matched = detokenizer.push(token)
        deltas.append(detokenizer.take(finished=matched is not None))
        if matched is not None:
            return deltas, matched
    return [*deltas, detokenizer.take(finished=True)], None


@pytest.mark.parametrize("text", ["plain words", "naïve żółć", "日本語 🙂 done", "👩‍👩‍👧 family", ""])
def test_deltas_join_to_the_text_and_never_split_a_character(tokenizer: Tokenizer, text: str) -> None:
    deltas, matched = stream(tokenizer, text)
    assert "".join(deltas) == text
    assert matched is None
    assert all("�" not in delta for delta in deltas)


def test_bytes_that_are_no_character_do_not_block_what_follows(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("日").ids[0]
    detokenizer = Detokenizer(tokenizer, [5])
    deltas = []
    for token in [broken, broken, *tokenizer.encode("ok").ids, broken]:
        assert detokenizer.push(token) is None
        deltas.append(detokenizer.take(finished=False))
    assert "".join(deltas).replace("�", "") == "ok"
    assert detokenizer.take(finished=True) == ""


@pytest.mark.parametrize(
    ("stop", "expected", "matched"),
    [
        (("fox",), "the quick brown ", "fox"),
        (("k b",), "the quic", "k b"),
        (("never", "brown fox"), "the quick ", "brown fox"),
        (("fox", "brown"), "the quick ", "brown"),
        (("the",), "", "the"),
        (("foxes",), "the quick brown fox jumps", None),
    ],
)
def test_stop_strings_end_the_text_before_them(
    tokenizer: Tokenizer, stop: tuple[str, ...], expected: str, matched: str | None
) -> None:
    deltas, found = stream(tokenizer, "the quick brown fox jumps", stop)
    assert ("".join(deltas), found) == (expected, matched)


def test_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [5], stop=("abcd",))
    shown = ""
    for count, character in enumerate("xyabc", start=1):
        detokenizer.push(tokenizer.encode(character).ids[0])
        shown += detokenizer.take(finished=False)
        assert shown == "xyabc"[: max(0, count - 3)]
    assert shown + detokenizer.take(finished=True) == "xyabc"
