"""Traces in public formats: what is read, what is wrong with rows, and which files are refused."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pagedjax.errors import ConfigError
from pagedjax.sim.traces import Problem, Problems, TraceRow, format_names, open_trace

COMPACT = """# dataset: a made-up set
# fields: prompt_tokens: of prompts
arrival_s,prompt_tokens,output_tokens
5.5,3,4
5.75,10,1
"""
CUT = gzip.compress(COMPACT.encode(), 0, mtime=0)[:25]  # without the time: every test process must collect the same
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:16:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,2162,5
"""
VIDUR = "num_prefill_tokens,num_decode_tokens,total,arrived_at\n12.0,5,17,1.5\n7,6,13,2.25\n"
MOONCAKE = [
    {"timestamp": 1000, "input_length": 513, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 1250, "input_length": 512, "output_length": 3, "hash_ids": [46]},
]
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"}]},
    {
        "id": "b",
        "conversations": [
            {"from": "system", "value": "x"},
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b c d"},
            {"from": "human", "value": "e f"},
            {"from": "gpt", "value": "g"},
        ],
    },
]
ALPACA = [
    {"instruction": "say it twice", "input": "it is", "output": "it is it is"},
    {"instruction": "count", "input": "", "output": "one two"},
]


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def npz(**changes) -> bytes:
    arrays = {
        "timestamp_ms": np.array([1000, 1250], np.int32),
        "input_length": np.array([513, 512], np.int32),
        "output_length": np.array([52, 3], np.int32),
        "hash_offsets": np.array([0, 2, 3]),
        "hash_ids": np.array([46, 47, 46], np.int32),
        "meta": json.dumps({"dataset": "packed", "rows": 2}),
    }
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
    return file.getvalue()


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "trace") -> Path:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
    """The folder of a tokenizer that makes a token of every word, and puts one more around a text if it may."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "[s]": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[s] $A", special_tokens=[("[s]", 1)])
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2).save_pretrained(folder)
    return str(folder)


# Quotation marks in its texts are marks, of which there may be an odd number.
PARALLEL = '# dataset: sentences\nenglish\tgerman\tenglish_tokens\tgerman_tokens\n"a, b\tc\t13\t29\nd\t"e\t5\t7\n'
HASHED = [TraceRow(513, 52, 0.0, (46, 47)), TraceRow(512, 3, 0.25, (46,))]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("content", "rows", "details"),
    [
        (COMPACT, [TraceRow(3, 4, 0.0), TraceRow(10, 1, 0.25)], "a made-up set"),
        ("prompt_tokens_est,output_tokens\n3,4\n", [TraceRow(3, 4)], "format compact"),
        (VIDUR, [TraceRow(12, 5, 0.0), TraceRow(7, 6, 0.75)], "format vidur"),
        ("x,num_decode_tokens,num_prefill_tokens\r\n,5,12\r\n", [TraceRow(12, 5)], "format vidur"),
        (PARALLEL, [TraceRow(13, 29), TraceRow(5, 7)], "sentences"),
        (lines(MOONCAKE), HASHED, "format mooncake"),
        (npz(), HASHED, "packed"),
    ],
    ids=["compact", "compact-est", "vidur", "vidur-untimed", "parallel", "mooncake", "mooncake-npz"],
)
def test_rows_are_what_the_file_says(write, content, rows, details, compressed):
    content = content.encode() if isinstance(content, str) else content
    trace = open_trace(write(gzip.compress(content) if compressed else content))
    assert list(trace.rows()) == rows == list(trace.rows(seed=5))
    assert trace.has_times == (rows[0].time is not None)
    assert trace.block_tokens == (512 if rows[0].block_hashes else 0)
    assert not trace.is_statistics and trace.problems.lines() == []
    assert trace.description == f"the real lengths of trace ({details})"


def test_dates_are_seconds_from_the_first(write):
    rows = list(open_trace(write(AZURE)).rows())
    assert [row[:2] for row in rows] == [(374, 44), (396, 109), (2162, 5)]
    assert [row.time for row in rows] == pytest.approx([0.0, 64.314579, 15_140_653.32934], abs=2e-6)


@pytest.mark.parametrize("as_text", [json.dumps, lines, lambda records: json.dumps(records, indent=2)])
def test_texts_are_counted(write, words, as_text):
    trace = open_trace(write(as_text(SHAREGPT)), tokenizer=words)
    assert list(trace.rows()) == [TraceRow(3, 2), TraceRow(1, 3)]
    trace = open_trace(write(as_text(ALPACA)), tokenizer=words)
    assert list(trace.rows()) == [TraceRow(5, 4), TraceRow(1, 2)]
    assert (
        trace.description == f"the real lengths of trace (format alpaca, tokens counted with the tokenizer of {words})"
    )


def test_texts_are_counted_with_the_bundled_model_by_default(write, smollm2_gguf):
    task = {"instruction": "Give three tips for staying healthy.", "output": "Eat well."}
    trace = open_trace(write(json.dumps([task])))
    assert list(trace.rows()) == [TraceRow(7, 3)] and trace.description.endswith("the tokenizer of smollm2-135m)")


def test_a_byte_order_mark_and_blank_lines_do_no_harm(write):
    assert list(open_trace(write("\ufeff\n" + VIDUR.replace("\n", "\n\n"))).rows())[1] == TraceRow(7, 6, 0.75)
    assert len(list(open_trace(write("\ufeff\n" + lines(MOONCAKE) + "\n")).rows())) == 2


def test_bad_rows_of_a_table_are_counted_and_named(write):
    table = """prompt_tokens,output_tokens,arrival_s
5,5,10
-1,5,11
5,-2,11
0,5,11
5,many,11
5,5,soon
5,5,nan
5
,5,12
5.5,5,12
6,6,14
7,7,13
8,8,13.5
9,9,15
"""
    trace = open_trace(write(table))
    late = [(6, 6, 4.0), (7, 7, 4.0), (8, 8, 4.0), (9, 9, 5.0)]
    assert [row[:3] for row in trace.rows()] == [(5, 5, 0.0), *late]
    assert trace.problems.lines() == [
        "2 rows have a negative length (first: line 3), left out",
        "1 row has a length of zero tokens (first: line 5), left out",
        "4 rows have a length or a time that is no number (first: line 6), left out",
        "2 rows have a field missing (first: line 9), left out",
        "2 rows have a time before that of an earlier row (first: line 13), kept with the latest time so far",
    ]
    assert trace.problems.total == 11
    next(trace.rows())
    assert trace.problems.total == 0


def test_bad_records_are_counted_and_named(write, words):
    good = MOONCAKE[0]
    bad = [good | {"hash_ids": [1]}, good | {"hash_ids": ["a", "b"]}, {**good, "input_length": None}]
    bad += [good | {"output_length": True}, {key: good[key] for key in good if key != "timestamp"}]
    trace = open_trace(write(lines([*bad, good]) + '[1]\n{"timestamp": 3, "inp'))
    assert [row.block_hashes for row in trace.rows()] == [(), (), (46, 47)]
    assert trace.problems.lines() == [
        "2 rows have other than one hash for every block of the prompt (first: line 1), kept without hashes",
        "2 rows have a field missing (first: line 3), left out",
        "1 row has a length or a time that is no number (first: line 4), left out",
        "2 rows have no JSON object that can be read (first: line 7), left out",
    ]
    human, gpt = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
    turns = [[gpt], None, [gpt, human], [3, human, gpt], [human, gpt | {"value": 7}], [human, gpt | {"value": ""}]]
    trace = open_trace(write(json.dumps([{"conversations": given} for given in turns] + [7])), tokenizer=words)
    assert list(trace.rows()) == [TraceRow(1, 1)]
    assert trace.problems.lines() == [
        "3 rows have no turn of a human with an answer of gpt behind it (first: entry 1), left out",
        "1 row has something else where a text belongs (first: entry 5), left out",
        "1 row has a length of zero tokens (first: entry 6), left out",
        "1 row has no JSON object that can be read (first: entry 7), left out",
    ]
    trace = open_trace(write(json.dumps([*ALPACA, {"instruction": "a"}, ALPACA[0] | {"input": None}])), tokenizer=words)
    assert len(list(trace.rows())) == 2
    assert trace.problems.lines() == [
        "1 row has a field missing (first: entry 3), left out",
        "1 row has something else where a text belongs (first: entry 4), left out",
    ]


@pytest.mark.parametrize(
    "text", ["num_prefill_tokens,num_decode_tokens\n" + "11,12\n" * 9999, lines(MOONCAKE[:1] * 999)]
)
def test_of_a_gzip_that_is_cut_short_the_whole_rows_are_kept(write, text):
    compressed = gzip.compress(text.encode(), 0)
    trace = open_trace(write(compressed[: len(compressed) // 2], "cut.gz"))
    rows = list(trace.rows())
    num_lines = len(rows) + (text[0] == "n")
    assert len(text) * 0.4 < sum(map(len, text.splitlines(keepends=True)[:num_lines])) <= len(text) / 2
    cut = f"1 row has been cut off with the rest of the file (first: line {num_lines + 1}), left out"
    assert trace.problems.lines()[-1] == cut


def test_a_stray_quotation_mark_is_counted(write):
    text = 'num_prefill_tokens,num_decode_tokens\n1,2\n"3,4\n' + "5,6\n" * 50_000
    trace = open_trace(write(text))
    assert len(list(trace.rows())) > 10_000
    assert trace.problems.lines()[0].startswith("1 row has no CSV fields that can be read (first: line ")


def test_problems_of_every_kind_make_a_sentence():
    problems = Problems()
    for kind in Problem:
        problems.add(kind, "line 1")
    assert problems.total == len(problems.lines()) == len(Problem)


COLUMNS = {
    "compact": "prompt_tokens or prompt_tokens_est, output_tokens",
    "azure": "ContextTokens, GeneratedTokens, TIMESTAMP",
    "vidur": "num_prefill_tokens, num_decode_tokens",
    "mooncake": "timestamp or timestamp_ms, input_length, output_length, hash_ids",
    "sharegpt": "conversations",
    "alpaca": "instruction, output",
    "parallel": "english_tokens or source_tokens, german_tokens or target_tokens",
}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("a,b\n1,2\n", "the columns 'a, b'"),
        ("prompt_tokens,b\n1,2\n", "the columns 'prompt_tokens, b'"),
        ("", "no columns"),
        ('[{"x": 1}, {"y": 2}]', "the keys 'x, y'"),
        ("[]", "no keys"),
        ('{"input_length": 1, "timestamp": 3}', "the keys 'input_length, timestamp'"),
        (lines(MOONCAKE).replace("hash", "cash"), "the keys 'timestamp, input_length, output_length, cash_ids'"),
        (npz(hash_ids=None), "the arrays 'timestamp_ms, input_length, output_length, hash_offsets, meta'"),
        (bytes(range(256)) * 9, "the columns '"),
    ],
)
def test_a_file_of_no_known_format_is_told_what_it_has_and_what_is_known(write, content, found):
    with pytest.raises(ConfigError) as error:
        open_trace(write(content))
    known = "; ".join(f"{name} ({columns})" for name, columns in COLUMNS.items())
    assert f"trace is no trace of a known format: it has {found}" in str(error.value)
    assert str(error.value).endswith(f", and known are {known}") and tuple(COLUMNS) == format_names()


def test_a_format_can_be_chosen(write):
    path = write("prompt_tokens,output_tokens,num_prefill_tokens,num_decode_tokens\n1,2,3,4\n")
    assert [next(open_trace(path, format=name).rows())[:2] for name in (None, "compact", "vidur")] == [
        (1, 2),
        (1, 2),
        (3, 4),
    ]
    with pytest.raises(
        ConfigError, match=r"no trace of the format azure: .* known are azure \(ContextTokens, [^;]*\)$"
    ):
        open_trace(path, format="azure")
    with pytest.raises(ConfigError, match="format='csv' is not allowed: format must be one of compact, azure, vidur, "):
        open_trace(path, format="csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            gzip.compress(COMPACT.encode(), 0, mtime=0)[:25],
            "cannot be read: 1 row has been cut off with the rest of the file",
        ),
        (b"\x1f\x8bnothing of the kind", "cannot be read"),
        (b"PK\x03\x04 no zip", "cannot be read as .npz"),
        (npz()[:-40], "cannot be read as .npz"),
        (
            npz(hash_offsets=np.array([0, 2])),
            "input_length, output_length, timestamp_ms must be integers, one a request",
        ),
        (npz(output_length=np.array([1.5, 2.5])), "must be integers, one a request, hash_offsets one more"),
        (npz(hash_offsets=None), "hash_offsets one more"),
        (json.dumps([{"instruction": "a", "output": "b"}] * 99)[:-3], "its list breaks off behind 98 entries"),
        ('[{"instruction": "a", "output": }]', "its list breaks off behind 0 entries (Expecting value"),
        ("ContextTokens,GeneratedTokens,TIMESTAMP\n", "no row that can be used: there are none; it has the columns "),
        (
            "num_prefill_tokens,num_decode_tokens\n0,3\n0,4\n",
            "no row that can be used: 2 rows have a length of zero tokens (first: line 2), left out; it has the columns"
            " 'num_prefill_tokens, num_decode_tokens', and was read as vidur (num_prefill_tokens, num_decode_tokens)",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(write, words, content, message):
    path = write(content)
    with pytest.raises(ConfigError) as error:
        list(open_trace(path, tokenizer=words if b"instruction" in path.read_bytes() else None).rows())
    assert str(error.value).startswith(str(path)) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_must_be_one_and_be_needed(write, tmp_path):
    with pytest.raises(
        ConfigError, match="tokenizer='x' is not allowed: tokenizer must be None for a file of the format"
    ):
        open_trace(write(COMPACT), tokenizer="x")
    path = write(json.dumps(ALPACA))
    with pytest.raises(ConfigError, match="holds none: a folder must have tokenizer.json, "):
        open_trace(path, tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=r"tokenizer='a/b/c/d' cannot be loaded \(.*\): it must be a local folder"):
        open_trace(path, tokenizer="a/b/c/d")


@pytest.mark.parametrize(("head", "row"), [(VIDUR.split("\n")[0], "123,45,168,{}"), ("", json.dumps(MOONCAKE[1]))])
def test_a_million_rows_would_not_be_held_in_memory(write, head, row):
    path = write("\n".join([head, *(row.replace("{}", str(number)) for number in range(50_000))]))
    assert path.stat().st_size > 800_000
    rows = open_trace(path).rows()
    tracemalloc.start()
    assert sum(1 for _ in rows) == 50_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_a_json_list_is_read_an_entry_at_a_time(write, words):
    path = write(json.dumps(SHAREGPT[:1] + [{"conversations": [], "more": "x" * 100_000}] * 40))
    trace = open_trace(path, tokenizer=words)
    next(trace.rows())
    tracemalloc.start()
    assert len(list(trace.rows())) == 1 and trace.problems.total == 40
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 800_000 < path.stat().st_size


def test_what_is_not_asked_for_is_not_read(write):
    rows = open_trace(write(VIDUR + "rubbish\n" * 9)).rows()
    assert len(list(islice(rows, 2))) == 2
