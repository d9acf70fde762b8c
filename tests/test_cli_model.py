"""The commands on a tiny random model, from the command line to its tokens."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny_model import CONFIG, write_gguf

import pagedjax.demo
from pagedjax import LLM, EngineConfig, SamplingParams
from pagedjax.bench.peer import TransformersPeer
from pagedjax.bench.workload import random_workload
from pagedjax.cli import main

ENGINE = ["--num-blocks", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "16"]
SAME_ENGINE = EngineConfig(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
CONFIG_512 = dataclasses.replace(CONFIG, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a two-layer model with a tokenizer and 512 positions."""
    return str(write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", CONFIG_512))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    """The same model with the same engine as the commands make."""
    return LLM(model, SAME_ENGINE)


def test_generate_prints_what_the_library_gives(model: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--max-tokens", "12", "--temperature", "0.7", "--seed", "5", "--ignore-eos"]
    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=5, ignore_eos=True)
    text = llm.generate("hello world", params)[0].outputs[0].text
    assert main(["generate", "hello world", "--model", model, *ENGINE, *sampling]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main(["generate", "hello world", "12", "--model", model, *ENGINE, *sampling]) == 0
    assert f"[1] hello world\n{text}\n" in capsys.readouterr().out


def test_generate_refuses_a_prompt_that_is_too_long(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x" * 600, "--model", model, *ENGINE]) == 1
    error = capsys.readouterr().err
    assert "prompt of 600 tokens" in error and "max_model_len=512" in error and "Traceback" not in error


def test_info_counts_bytes_and_names_what_runs(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "info.json"
    assert main(["info", "--model", model, "--num-blocks", "10", "--block-size", "4", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    # K and V, 2 layers, 2 heads, 4 tokens, 16 wide, float32
    assert row["bytes_per_block"] == 2 * 2 * 2 * 4 * 16 * 4
    assert row["num_blocks"] == 10 and row["pool_size_from"] == "num_blocks=10"
    assert row["pool_mib"] == 11 * row["bytes_per_block"] / 2**20
    assert row["weights_mib"] == row["num_parameters"] * 4 / 2**20
    assert row["platform"] == "cpu" and row["attention_backend"] == "xla"
    assert row["attention_backend_because"]
    assert 0 < row["memory_free_mib"] <= row["memory_total_mib"]
    assert {"python", "jax", "jaxlib", "flax", "pagedjax", "cache_folder"} <= row.keys()
    assert all(name in capsys.readouterr().out for name in ["cache_folder"])


def test_info_says_what_both_pools_take(model: str, tmp_path: Path) -> None:
    file, block = tmp_path / "info.json", 2 * 2 * 2 * 4 * 16 * 4
    size = ["--num-blocks", "10", "--block-size", "4", "--swap-space", str(7 * block + 5)]
    assert main(["info", "--model", model, *size, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())
    assert (row["preemption"], row["num_host_blocks"]) == ("auto", 7)
    assert (row["pool_bytes"], row["swap_space_bytes"], row["kv_bytes"]) == (11 * block, 7 * block, 18 * block)


def test_a_run_that_was_logged_is_replayed_and_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, trace = str(tmp_path / "run.log"), tmp_path / "trace.json"
    pressed = ["--num-blocks", "6", "--block-size", "4", "--max-model-len", "64", "--preemption", "swap"]
    pressed += ["--swap-space", "65536", "--max-tokens", "14", "--ignore-eos", "--event-log", log]
    assert main(["generate", "hello", "world", "--model", model, *pressed]) == 0
    assert main(["replay", log, "--trace", str(trace), "--check-invariants"]) == 0
    assert "same_plans" in capsys.readouterr().out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"prefill", "decode", "swapped", "waiting"} <= {event["name"] for event in events}


def test_info_tells_what_it_can_of_a_model_that_cannot_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert "jaxlib" in captured.out and "platform" in captured.out
    assert "'no-such-model'" in captured.err and "smollm2-135m" in captured.err


def test_info_refuses_a_backend_that_cannot_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--attention-backend", "triton"]) == 1
    error = capsys.readouterr().err
    assert "attention_backend" in error and "'triton'" in error and "platform cpu" in error and error.count("\n") == 1


def test_bench_measures_every_figure(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    argv = ["bench", "--model", model, *ENGINE, "--num-requests", "3", "--repeats", "2", "--sampled"]
    assert main([*argv, "--json", str(file)]) == 0
    ours, sampled = json.loads(file.read_text())
    workload = random_workload(3, 0, CONFIG.vocab_size)
    assert ours["system"] == "pagedjax" and sampled["system"] == "pagedjax sampled"
    assert ours["passes"] == 2 and ours["output_tokens"] == workload.num_output_tokens
    assert ours["output_tokens_per_s"] == pytest.approx(ours["output_tokens"] / ours["seconds"])
    assert sampled["pagedjax_speedup"] == pytest.approx(sampled["seconds"] / ours["seconds"])
    for name in ("first_token_ms", "per_output_token_ms"):
        assert 0 < ours[f"{name}_p50"] <= ours[f"{name}_p99"] and ours[f"{name}_mean"] > 0
    parts = sum(ours[f"{part}_ms"] for part in ("plan", "prepare", "device_wait", "output"))
    assert 0 < parts <= 1e3 * ours["seconds"] / ours["steps"]
    assert ours["steps"] >= max(workload.output_lens) and ours["peak_blocks"] <= 64
    assert 0.8 < ours["kv_utilisation"] <= 1
    assert ours["compilations"] == sampled["compilations"] == 0
    out, origin = capsys.readouterr().out, ours.pop("provenance")
    assert all(name in out for name in ours)
    assert origin == sampled["provenance"] and origin["seeds"] == {"workload": 0, "engine": 0}
    configuration = origin["configuration"]
    assert configuration["engine"] == dataclasses.asdict(SAME_ENGINE) and configuration["model"]["name"] == model
    assert (configuration["num_blocks"], configuration["max_model_len"]) == (64, 512)
    assert configuration["workload"]["num_requests"] == 3 and configuration["attention_backend"] == "xla"
    assert origin["device"]["platform"] == "cpu" and "jaxlib" in origin["packages"]


def test_bench_says_beforehand_when_a_request_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", model, *ENGINE, "--num-requests", "3", "--max-model-len", "200"]) == 1
    error = capsys.readouterr().err
    assert "max_model_len=200" in error and "266 tokens" in error
    assert main(["bench", "--model", model, "--num-blocks", "8", "--num-requests", "3"]) == 1
    error = capsys.readouterr().err
    assert "8 blocks of 16 tokens" in error and "266 tokens" in error


def test_bench_against_transformers_compares_same_tokens(
    model: str, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="runs transformers, which needs torch")
    workload = random_workload(3, 0, CONFIG.vocab_size)
    peer = TransformersPeer(llm.engine.params, llm.engine.model_config, "float32")
    theirs = peer.generate(workload)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in workload.output_lens]
    ours = llm.generate([{"prompt_token_ids": prompt} for prompt in workload.prompts], params)
    for output, row, length in zip(ours, theirs, workload.output_lens, strict=True):
        assert output.outputs[0].token_ids == row[:length]

    file = tmp_path / "bench.json"
    argv = ["bench", "--model", model, *ENGINE, "--num-requests", "3", "--repeats", "1", "--against", "transformers"]
    assert main([*argv, "--json", str(file)]) == 0
    rows = {row["system"]: row for row in json.loads(file.read_text())}
    assert list(rows) == [
        "pagedjax",
        "transformers batch 8",
        "transformers in turn",
        "pagedjax alone",
        "transformers alone",
    ]
    for name, counterpart in (
        ("transformers batch 8", "pagedjax"),
        ("transformers in turn", "pagedjax"),
        ("transformers alone", "pagedjax alone"),
    ):
        ratio = rows[counterpart]["output_tokens_per_s"] / rows[name]["output_tokens_per_s"]
        assert rows[name]["pagedjax_speedup"] == pytest.approx(ratio)
        assert rows[name]["output_tokens"] == rows[counterpart]["output_tokens"]
    assert "-" in capsys.readouterr().out  # what a peer does not measure


def test_ctrl_c_in_a_terminal_ends_generate_without_a_traceback(model: str) -> None:
    argv = [sys.executable, "-m", "pagedjax.cli", "generate", "hello", "--model", model, *ENGINE]
    argv += ["--max-tokens", "500", "--ignore-eos"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        first = process.stdout.read(1)  # it is answering
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
        watchdog.cancel()
    assert process.returncode == 130, errors.decode()
    assert (first + rest).endswith(b"\n") and b"Traceback" not in errors
    assert b" tokens in " in errors


def test_ctrl_c_while_the_model_loads_is_one_line(model: str) -> None:
    argv = ["generate", "hello", "--model", model, *ENGINE]
    hook = "import signal, sys, pagedjax.models.gguf as g\n"
    hook += "g.GGUFFile.params = lambda *a, **k: signal.raise_signal(signal.SIGINT)\n"
    hook += f"from pagedjax.cli import main\nsys.exit(main({argv!r}))\n"
    done = subprocess.run([sys.executable, "-c", hook], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pagedjax: interrupted\n")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("pagedjax.cli", "pagedjax.cli.flags"),
        ("pagedjax.cli", "jax"),
        ("pagedjax.cli", "pagedjax.engine"),
        ("pagedjax.demo", "jax"),
    ],
)
def test_ctrl_c_while_modules_load_is_one_line(command: str, module: str) -> None:
    hook = f"""
import importlib.abc, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from {command} import main
sys.argv = ["x", "generate", "hello", "--model", "no-such-model"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", hook], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pagedjax: interrupted\n")


def test_chat_refuses_a_line_that_is_no_utf8_and_answers_the_others(model: str) -> None:
    argv = [sys.executable, "-m", "pagedjax.cli", "chat", "--model", model, *ENGINE, "--max-tokens", "1"]
    env = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(argv, input=b"caf\xe9\nhello\n", capture_output=True, env=env, timeout=300)
    assert done.returncode == 1 and done.stdout.count(b"\n") == 1
    assert b"'caf\\udce9' is not allowed: content must be text" in done.stderr and b"Traceback" not in done.stderr


def test_demo_answers_and_counts_what_a_reservation_would_take(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pagedjax.demo, "llm_class", lambda: lambda name, config: LLM(model, SAME_ENGINE))
    monkeypatch.setattr(pagedjax.demo, "QUESTIONS", ("hello", "world", "12"))
    assert pagedjax.demo.main() == 0
    out = capsys.readouterr().out
    assert all(f"> {question}\n" in out for question in ("hello", "world", "12"))
    table = dict(line.rsplit(None, 1) for line in out.splitlines()[-9:])
    table = {name.strip(): value for name, value in table.items()}
    assert table["requests at once"] == "3"
    assert table["blocks, 2048 tokens reserved per request"] == "384"
    peak = int(table["blocks used at peak (of 16 tokens)"])
    assert float(table["times as much"]) == pytest.approx(384 / peak, abs=0.06)


@pytest.mark.parametrize("command", [["-m", "pagedjax.demo"], ["-m", "pagedjax.cli", "generate", "x"]])
def test_without_network_and_model_one_sentence_and_exit_1(command: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "PAGEDJAX_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    (sentence,) = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.startswith("pagedjax:")]
    assert "smollm2-135m" in sentence and "Traceback" not in done.stderr
