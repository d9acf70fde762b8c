"""Flags follow the dataclasses: every field has one, and what is not said keeps the class's default."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from pagedjax.cli import build_parser, main
from pagedjax.cli.flags import add_model_flags, add_sampling_flags, engine_config, sampling_fields
from pagedjax.config import EngineConfig
from pagedjax.request import SamplingParams

ENGINE = {
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "kv_cache_dtype": (["--kv-cache-dtype", "float16"], "float16"),
    "block_size": (["--block-size", "64"], 64),
    "num_blocks": (["--num-blocks", "7"], 7),
    "pool_bytes": (["--pool-bytes", "1048576"], 1048576),
    "max_model_len": (["--max-model-len", "100"], 100),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "99"], 99),
    "enable_chunked_prefill": (["--no-enable-chunked-prefill"], False),
    "enable_prefix_caching": (["--enable-prefix-caching"], True),
    "prefix_hash_seed": (["--prefix-hash-seed", "7"], 7),
    "preemption": (["--preemption", "recompute"], "recompute"),
    "swap_space": (["--swap-space", "1048576"], 1048576),
    "allocator": (["--allocator", "orca-pow2"], "orca-pow2"),
    "batching": (["--batching", "static"], "static"),
    "watermark": (["--watermark", "0.5"], 0.5),
    "attention_backend": (["--attention-backend", "triton"], "triton"),
    "attention_interpret": (["--attention-interpret"], True),
    "overlap": (["--no-overlap"], False),
    "seed": (["--engine-seed", "5"], 5),
    "event_log": (["--event-log", "run.log"], "run.log"),
    "snapshot_path": (["--snapshot-path", "a", "--snapshot-every", "9"], "a"),
    "snapshot_every": (["--snapshot-path", "a", "--snapshot-every", "9"], 9),
}
SAMPLING = {
    "n": (["--n", "3"], 3),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "5"], 5),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.1"], 0.1),
    "max_tokens": (["--max-tokens", "none"], None),
    "min_tokens": (["--min-tokens", "3"], 3),
    "stop": (["--stop", "a b", "--stop", "c"], ("a b", "c")),
    "stop_token_ids": (["--stop-token-ids", "1,2"], (1, 2)),
    "ignore_eos": (["--ignore-eos"], True),
    "seed": (["--seed", "11"], 11),
    "logprobs": (["--logprobs", "2"], 2),
    "prompt_logprobs": (["--prompt-logprobs", "1"], 1),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "1.5"], 1.5),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "logit_bias": (["--logit-bias", "3=-1.5,4=2"], {3: -1.5, 4: 2.0}),
}


def parse(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_sampling_flags(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_every_engine_field_has_a_flag(name):
    flags, value = ENGINE[name]
    assert getattr(engine_config(parse(flags)), name) == value


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_every_sampling_field_has_a_flag(name):
    flags, value = SAMPLING[name]
    assert getattr(SamplingParams(**sampling_fields(parse(flags))), name) == value


def test_what_is_not_said_keeps_the_classes_defaults():
    args = parse([])
    assert engine_config(args) == EngineConfig()
    assert SamplingParams(**sampling_fields(args)) == SamplingParams()


def test_the_two_seeds_do_not_meet():
    args = parse(["--seed", "3"])
    assert engine_config(args).seed == 0
    assert sampling_fields(args) == {"seed": 3}


def test_help_explains_every_flag_in_the_classes_own_words_with_the_commands_default(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens per block, a power of two. (default: 16)" in text
    assert "smollm2-135m, a Hugging Face id, a local folder or a .gguf file" in text
    assert "output tokens at most. None: as many as model and pool allow. (default: 128)" in text
    for action in build_parser()._actions[-1].choices["generate"]._actions:  # type: ignore[union-attr]
        assert action.help and not action.help.startswith(" (default"), f"{action.option_strings} says nothing"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--block-size", "12"], ["block_size=12", "power of two"]),
        (["--top-p", "1.5"], ["top_p=1.5", "(0, 1]"]),
        (["--num-blocks", "4", "--pool-bytes", "5"], ["pool_bytes=5", "num_blocks=4"]),
        (["--dtype", "int8"], ["dtype='int8'", "float32, bfloat16"]),
    ],
)
def test_a_value_that_is_not_allowed_is_one_sentence_and_exit_1(flags, words, capsys):
    assert main(["generate", "hello", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedjax: ") and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate"], ["PROMPT"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens", "int (or none)", "many"]),
        (["generate", "x", "--stop-token-ids", "1;2"], ["--stop-token-ids", "1;2"]),
        (["generate", "x", "--logit-bias", "7"], ["--logit-bias", "7"]),
        (["bench", "--num-requests", "0"], ["--num-requests", "0 is not at least 1"]),
        (["bench", "--against", "vllm"], ["--against", "vllm", "transformers"]),
        (
            ["info", "--json", "no/such/folder/x.json"],
            ["--json", "'no/such/folder/x.json' (No such file or directory)"],
        ),
        (["bench", "--host", "--json", "/"], ["--json", "cannot write '/' (Is a directory)"]),
        (["bench", "--json", ""], ["--json", "cannot write '' (Is a directory)"]),
        (["bench", "--json", "x" * 300], ["--json", "(File name too long)"]),
        (["serve"], ["serve", "generate"]),
    ],
)
def test_a_command_line_that_cannot_be_read_says_where(argv, words, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
