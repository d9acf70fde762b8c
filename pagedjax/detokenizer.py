"""Token ids to text, one token at a time: never half a character, and never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import decoders

# A character takes at most 4 bytes, hence at most 4 tokens: what still ends in the replacement character after this
# many tokens is not an unfinished character but what the model wrote.
_MAX_PENDING = 16
_CONTEXT = 6


class Detokenizer:
    """Text of one sequence's output, as its tokens arrive.

    What `append` and `flush` return, put together, is `tokenizer.decode` of all output ids for byte-level tokenizers.
    For others (those whose first token loses its leading space) it is what the output adds to the prompt's text.

    Args:
        tokenizer: a fast tokenizer of `transformers`.
        prompt_token_ids: what came before the output.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        byte_level = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
        self._decoder = (
            _ByteLevelDecoder(tokenizer, skip_special_tokens)
            if byte_level
            else _WindowDecoder(tokenizer, prompt_token_ids, skip_special_tokens)
        )
        self._text = ""
        self._new: list[str] = []

    @property
    def text(self) -> str:
        """All the text so far, without what `append` still holds back."""
        if self._new:
            self._text += "".join(self._new)
            self._new.clear()
        return self._text

    def append(self, token_id: int) -> str:
        """Takes the next output token and returns the text that it completes, possibly none."""
        return self._add(self._decoder.append(token_id))

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes the replacement character."""
        return self._add(self._decoder.flush())

    def _add(self, new: str) -> str:
        if new:
            self._new.append(new)
        return new


class _ByteLevelDecoder:
    """For tokenizers whose tokens are bytes: an incremental UTF-8 decoder says where characters end."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._bytes = _token_bytes(tokenizer)
        self._skipped = self._bytes.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, filled as they are asked for; shared by all sequences of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._backend = tokenizer.backend_tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""  # models may have more rows than the tokenizer has tokens
        table = _byte_of_char()
        # a token that is not spelled in the byte alphabet (an added one, with a space, say) stands for itself
        spelled = bytes(table[char] for char in token) if all(char in table for char in token) else token.encode()
        self[token_id] = spelled
        return spelled


_TABLES: WeakKeyDictionary[Any, _TokenBytes] = WeakKeyDictionary()


def _token_bytes(tokenizer: Any) -> _TokenBytes:
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _TokenBytes(tokenizer)
    return _TABLES[tokenizer]


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _WindowDecoder:
    """For any other tokenizer: decodes the last few tokens with and without the newest, and takes the difference.

    The window starts at tokens whose text is already out, because the text of a token may depend on those before it.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._num_read = len(self._window)  # tokens of the window whose text is out

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._take(final=len(self._window) - self._num_read >= _MAX_PENDING)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        done = self._decode(self._window[: self._num_read])
        text = self._decode(self._window)
        if text.endswith("�") and not final:
            return ""
        if text != done:  # tokens without text (control tokens) give the next one no context: keep the older ones
            self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(done) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


def cut_at_stop(stops: Sequence[str], text: str, new: str) -> tuple[str, str | None]:
    """Ends a text before the stop string that is complete first.

    Of several that are complete at the same character, the longest counts; so the result does not depend on how the
    text was cut into pieces. Only text that `new` can have completed is looked at.

    Args:
        stops: strings that end the text, none empty.
        text: all text before, in which no stop string occurs.
        new: text that comes after it.

    Returns:
        The text up to the stop string and that string, or all the text and None.
    """
    whole = text + new
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = whole.find(stop, max(0, len(text) - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    return (whole, None) if best is None else (whole[: best[1]], best[2])


def num_held_chars(stops: Sequence[str], text: str) -> int:
    """Length of the text's longest ending that may become a stop string: not to be shown yet."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        ending = text[-length:]
        if any(stop.startswith(ending) for stop in stops if len(stop) > length):
            return length
    return 0
