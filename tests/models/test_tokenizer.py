"""The tokenizer that is built from a GGUF's metadata, against `transformers`' own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CONFIG, TOKENS, write_gguf
from tokenizers import pre_tokenizers

from pagedjax.errors import ModelError
from pagedjax.models.gguf import GGUFFile
from pagedjax.models.tokenizer import load_tokenizer, tokenizer_from_gguf

# No digit here follows two spaces, and no numeral but 0 to 9 follows one: there transformers differs (see below)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces,\ttabs\t\tand\n\nnew lines \r\n",
    "I'm sure they've said it's fine; don't YOU'LL",
    "3.14159, 2024-12-31 and 1,000,000 (or 0x1F)",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nclass A:\n\tpass",
    "naïve café, Ångström, ß, İstanbul",
    "漢字とかな、한국어 и русский, العربية עברית ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽‍♀️ x🎉y",
    "\u200b\ufeff\u00a0\u3000 odd spaces \u2028",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>a/b<file_sep>c.py<|im_start>",
    "a" * 300,
    "!!!???...---===>>>",
    "e\u0301 combining, \u0000 and \u001f control",
]


@pytest.fixture
def tokenizer(smollm2_tokenizer: Any) -> Any:
    return smollm2_tokenizer


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    pytest.importorskip("torch", reason="transformers reads a tokenizer out of a GGUF only with torch")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


def test_ids_equal_those_of_transformers(tokenizer: Any, theirs: Any):
    for text in TEXTS:
        assert tokenizer(text).input_ids == theirs(text).input_ids, text
        ids = theirs(text).input_ids
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_special_tokens_equal_those_of_transformers(tokenizer: Any, theirs: Any):
    assert tokenizer.special_tokens_map == theirs.special_tokens_map
    assert tokenizer.added_tokens_decoder == theirs.added_tokens_decoder
    assert tokenizer.chat_template == theirs.chat_template
    assert tokenizer.get_vocab() == theirs.get_vocab()


def test_numerals_equal_those_of_transformers_once_it_splits_digits(tokenizer: Any, theirs: Any):
    """`transformers` ignores the GGUF's pre-tokenizer `smollm`; the model was trained with digits on their own."""
    theirs = copy.deepcopy(theirs)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, "a  5", "\n 1", "x = 12   # 3", " ½ ⅷ ² ٣ 万"]:
        assert tokenizer(text).input_ids == theirs(text).input_ids, text


def test_prompts_of_the_golden_file(tokenizer: Any, golden: dict[str, Any]):
    for case in golden["greedy"]:
        messages = [{"role": "user", "content": case["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == case["prompt_ids"]


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    return tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "a.gguf")))


def test_digits_are_pieces_of_their_own(tiny: Any):
    """The merge "1 2" exists and is never used; spaces before a digit stay with each other, not with it."""
    assert tiny.tokenize("12") == ["1", "2"]
    assert tiny.tokenize("hello  1") == ["hello", "Ġ", "Ġ", "1"]
    assert tiny.tokenize("hello wo") == ["hello", "Ġwo"]


def test_special_tokens_come_from_the_metadata(tiny: Any):
    assert (tiny.bos_token_id, tiny.eos_token_id, tiny.unk_token_id, tiny.pad_token_id) == (1, 2, 0, 2)
    assert tiny.model_max_length == CONFIG.max_position_embeddings
    assert len(tiny) == len(TOKENS)
    ids = tiny("hello<|im_end|>").input_ids
    assert ids == [TOKENS.index("hello"), 2]
    assert tiny.decode(ids, skip_special_tokens=True) == "hello"
    text = tiny.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


def test_saved_and_loaded_again(tiny: Any, tmp_path: Path):
    tiny.save_pretrained(tmp_path / "saved")
    again: Any = load_tokenizer(tmp_path / "saved")
    for text in TEXTS:
        assert again(text).input_ids == tiny(text).input_ids
    assert again.chat_template == tiny.chat_template
    assert again.special_tokens_map == tiny.special_tokens_map
    assert load_tokenizer(tmp_path) is None


def test_gguf_without_a_tokenizer(tmp_path: Path):
    assert tokenizer_from_gguf(GGUFFile(write_gguf(tmp_path / "a.gguf", pre=None))) is None


def test_other_pre_tokenizers_are_refused(tmp_path: Path):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", pre="llama-bpe"))
    message = "model 'gpt2' with pre-tokenizer 'llama-bpe' cannot be read.*allowed: 'gpt2' with 'smollm'"
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(file)
