"""Text as it streams: never half a character, in the end exactly what `decode` says, and stop strings cut off."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TOKENS, write_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedjax.detokenizer import Detokenizer, cut_at_stop, num_held_chars
from pagedjax.models.gguf import GGUFFile
from pagedjax.models.tokenizer import tokenizer_from_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Byte-level: most tokens are single bytes."""
    return tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path_factory.mktemp("gguf") / "a.gguf")))


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """The other kind: spaces as marks, the first one dropped, bytes as <0xNN> for what has no token."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁", "!"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def stream(tokenizer: Any, ids: list[int], prompt: list[int], skip: bool = True) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.append(token_id))
        assert detokenizer.text == "".join(pieces)
    last = detokenizer.flush()
    assert detokenizer.text == "".join(pieces) + last
    return pieces, last


def test_a_character_comes_with_its_last_byte(tokenizer: Any):
    pieces, last = stream(tokenizer, tokenizer("a🎉é").input_ids, [1])
    assert pieces == ["a", "", "", "", "🎉", "", "é"]
    assert last == ""


def test_unfinished_character_at_the_end_is_flushed(tokenizer: Any):
    ids = tokenizer("a🎉").input_ids[:-1]
    pieces, last = stream(tokenizer, ids, [])
    assert pieces == ["a", "", "", ""]
    assert last == "�" == tokenizer.decode(ids)[1:]


def test_special_tokens_are_left_out_or_not(tokenizer: Any):
    ids = [*tokenizer("hello").input_ids, 2]
    assert stream(tokenizer, ids, [])[0] == ["hello", ""]
    assert stream(tokenizer, ids, [], skip=False)[0] == ["hello", "<|im_end|>"]


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Any):
    """Embeddings are often padded to more rows than there are tokens."""
    assert stream(tokenizer, [len(TOKENS) + 5], [])[0] == [""]


@given(text=st.text())
def test_any_text_streams_to_itself(tokenizer: Any, text: str):
    pieces, last = stream(tokenizer, tokenizer(text).input_ids, [])
    assert "".join(pieces) + last == tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)
    assert last == ""


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1)), skip=st.booleans())
def test_any_ids_stream_to_what_decode_says(tokenizer: Any, ids: list[int], skip: bool):
    pieces, last = stream(tokenizer, ids, [1, 5], skip)
    assert "".join(pieces) + last == tokenizer.decode(ids, skip_special_tokens=skip)


def test_the_real_tokenizer(smollm2_tokenizer: Any):
    real = smollm2_tokenizer
    text = "naïve 漢字, 👩‍👩‍👧 and 1234\n\n\tcode<|im_end|>" * 3
    for ids in (real(text).input_ids, list(range(0, 49152, 7)), list(range(49151, 0, -11))):
        for skip in (True, False):
            pieces, last = stream(real, ids, [], skip)
            assert "".join(pieces) + last == real.decode(ids, skip_special_tokens=skip)


def sentencepiece_ids(tokenizer: Any, *tokens: str) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(tokens))


def byte_tokens(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def test_other_tokenizers_continue_the_prompt(sentencepiece: Any):
    prompt = sentencepiece_ids(sentencepiece, "▁Hello")
    ids = sentencepiece_ids(sentencepiece, "▁world", *byte_tokens("🎉"), "!", "</s>", "▁world")
    pieces, last = stream(sentencepiece, ids, prompt)
    assert pieces == [" world", "", "", "", "🎉", "!", "", " world"]
    assert last == ""
    assert stream(sentencepiece, ids, [])[0][0] == "world"


def test_other_tokenizers_flush_an_unfinished_character(sentencepiece: Any):
    pieces, last = stream(sentencepiece, sentencepiece_ids(sentencepiece, "!", "<0xF0>", "<0x9F>"), [])
    assert pieces == ["!", "", ""]
    assert last == "��"


def test_other_tokenizers_do_not_wait_for_ever(sentencepiece: Any):
    """What can no longer become a character is let out, so that the window stays small."""
    pieces, last = stream(sentencepiece, sentencepiece_ids(sentencepiece, "<0xFF>") * 100, [])
    assert len(pieces) == 100
    assert max(len(piece) for piece in pieces) <= 16
    assert "".join(pieces) + last == "�" * 100


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Final text, the stop string, and what a stream would have shown after each piece."""
    text, shown = "", []
    for piece in pieces:
        text, stop = cut_at_stop(stops, text, piece)
        if stop is not None:
            return text, stop, shown
        shown.append(text[: len(text) - num_held_chars(stops, text)])
    return text, None, shown


def test_cut_before_the_stop_string():
    assert cut_at_stop(["END"], "one two E", "ND three") == ("one two ", "END")
    assert cut_at_stop(["END"], "one two E", "nd") == ("one two End", None)
    assert cut_at_stop([], "one", " two") == ("one two", None)


def test_the_stop_string_that_is_complete_first_counts():
    assert cut_at_stop(["abcdef", "cd"], "", "abcdef") == ("ab", "cd")
    assert cut_at_stop(["b", "ab"], "", "xab") == ("x", "ab")


def test_what_may_become_a_stop_string_is_held():
    assert num_held_chars(["END"], "one EN") == 2
    assert num_held_chars(["END"], "one END") == 0
    assert num_held_chars(["END", "\n\n"], "one\n") == 1
    assert num_held_chars(["aab"], "aaa") == 2
    assert num_held_chars([], "one") == 0


@given(stops=STOPS, pieces=st.lists(st.text("abcd", max_size=5)))
def test_stopping_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]):
    whole = "".join(pieces)
    text, stop, _ = run(stops, pieces)
    assert (text, stop) == run(stops, list(whole))[:2] == run(stops, [whole])[:2]
    if stop is None:
        assert text == whole
        assert not any(s in whole for s in stops)
    else:
        assert whole.startswith(text + stop)
        assert not any(s in (text + stop)[:-1] for s in stops)


@given(stops=STOPS, pieces=st.lists(st.text("abcd", max_size=5)))
def test_what_was_shown_is_never_taken_back(stops: list[str], pieces: list[str]):
    text, _, shown = run(stops, pieces)
    for before, after in zip(shown, shown[1:], strict=False):
        assert after.startswith(before)
    assert all(text.startswith(piece) for piece in shown)
    longest = max(len(stop) for stop in stops)
    if shown and len(shown) == len(pieces):
        assert len(text) - len(shown[-1]) < longest
