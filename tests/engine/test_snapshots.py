"""A saved engine goes on with the tokens it would have given; what is damaged or of something else is refused."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_harness import TINY, Runs, drain

from pagedjax.engine import Engine
from pagedjax.errors import ConfigError, ModelError, SnapshotError
from pagedjax.llm import LLM
from pagedjax.models.llama import init_params
from pagedjax.models.loader import LoadedModel
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams
from pagedjax.snapshots import files as snapshot_files
from pagedjax.snapshots import list_snapshots

SAMPLES = SamplingParams(n=3, max_tokens=18, temperature=1.0, seed=5, ignore_eos=True, logprobs=1)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=12)
PENALISED = SamplingParams(max_tokens=20, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=7)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logit_bias={7: 1.5})
PARAMS: list[Any] = [SAMPLES, BEAMS, PENALISED, GREEDY, SamplingParams(max_tokens=3)]
PRESSED = {"preemption": "swap", "swap_space": 1 << 20, "num_blocks": 30, "enable_prefix_caching": True}


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs] + [output.prompt_logprobs]
        for output in outputs
    ]


def tokens(done: dict[str, RequestOutput], names: list[str]) -> list[Any]:
    return [[(c.token_ids, c.finish_reason) for c in done[name].outputs] for name in names]


@pytest.fixture(scope="module")
def prompts(runs: Runs) -> list[list[int]]:
    return runs.prompts(13, 16, 7, 21, 5)


def start(runs: Runs, prompts: list[list[int]], **config: Any) -> tuple[Engine, list[str]]:
    engine = runs.engine(**config)
    return engine, [engine.add_request({"prompt_token_ids": p}, q) for p, q in zip(prompts, PARAMS, strict=True)]


def restore(runs: Runs, path: Path, **kwargs: Any) -> Engine:
    engine = Engine.restore(path, model=runs.model, progress=False, **kwargs)
    runs.share(engine)
    return engine


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs, prompts: list[list[int]]) -> dict[str, RequestOutput]:
    engine, _ = start(runs, prompts)
    return {output.request_id: output for output in drain(engine) if output.finished}


@pytest.mark.parametrize("keep_kv", [True, False], ids=["with-kv", "tokens-only"])
@pytest.mark.parametrize("overlap", [True, False], ids=["in-flight", "no-overlap"])
@pytest.mark.parametrize("steps", [1, 4, 9, 15])
def test_a_restored_engine_goes_on_with_the_same_tokens(
    runs: Runs,
    prompts: list[list[int]],
    uninterrupted: dict[str, RequestOutput],
    tmp_path: Path,
    steps: int,
    overlap: bool,
    keep_kv: bool,
) -> None:
    engine, names = start(runs, prompts, overlap=overlap, **PRESSED)
    done: dict[str, RequestOutput] = {}
    for step in range(steps):
        if step % 5 == 3:
            engine.scheduler.preempt_latest()
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert (engine._in_flight is not None) is overlap
    saved = engine.save(tmp_path / "run", keep_kv=keep_kv)
    assert saved.parent == tmp_path / "run" and list_snapshots(tmp_path / "run") == [saved]
    for path in (tmp_path / "run", saved):
        restored = restore(runs, path)
        restored.scheduler.check_invariants()
        both = done | {output.request_id: output for output in drain(restored) if output.finished}
        assert tokens(both, names) == tokens(uninterrupted, names)
        for name in (names[0], names[3]):
            assert repr(both[name].prompt_logprobs)[:60] == repr(uninterrupted[name].prompt_logprobs)[:60]
            assert [len(c.logprobs or ()) for c in both[name].outputs] == [
                len(c.logprobs or ()) for c in uninterrupted[name].outputs
            ]
        stats = restored.stats()
        assert (stats.usage.free, stats.host_blocks) == (restored.pool_info.num_slots, 0)
    # The engine that was saved goes on too.
    both = done | {output.request_id: output for output in drain(engine) if output.finished}
    assert tokens(both, names) == tokens(uninterrupted, names)


@pytest.mark.jax_matrix
def test_swapped_requests_come_back_from_the_snapshot(runs: Runs, prompts: list[list[int]], tmp_path: Path) -> None:
    engine, names = start(runs, prompts, **PRESSED)
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt_latest()
    engine.step()
    assert engine.stats().num_swapped
    engine.save(tmp_path)
    restored = restore(runs, tmp_path)
    assert restored.stats().host_blocks == engine.stats().host_blocks > 0
    expected = {output.request_id: output for output in drain(engine) if output.finished}
    found = {output.request_id: output for output in drain(restored) if output.finished}
    assert [results([expected[name]]) for name in expected] == [results([found[name]]) for name in expected]
    assert restored.stats().swapped_in_blocks > 0


def test_with_kv_nothing_is_computed_again_and_without_everything(runs: Runs, tmp_path: Path) -> None:
    engine = runs.engine()
    engine.add_request({"prompt_token_ids": runs.prompts(25)[0]}, GREEDY)
    for _ in range(4):
        engine.step()
    for keep_kv, most in ((True, 1), (False, 25 + 4)):
        engine.save(tmp_path, keep_kv=keep_kv)
        restored = restore(runs, tmp_path)
        restored.step()
        assert restored.stats().prompt_tokens == most


def test_texts_and_metrics_go_on(smollm2: LoadedModel, tmp_path: Path) -> None:
    config = {"num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128}
    runs = Runs(smollm2)
    engine = runs.engine(block_size=16, **config)
    params = SamplingParams(max_tokens=16, temperature=0.0, stop=["\n\n\n"], logprobs=2)
    name = engine.add_request("The capital of France is", params)
    for _ in range(7):
        engine.step()
    engine.save(tmp_path)
    restored = Engine.restore(tmp_path, progress=False)  # the model by its recorded source
    runs.share(restored)
    (expected,) = [output for output in drain(engine) if output.finished]
    (found,) = [output for output in drain(restored) if output.finished]
    assert found.request_id == name and found.outputs == expected.outputs
    assert found.metrics and expected.metrics
    assert found.metrics.first_token_time is not None
    assert found.metrics.finished_time > found.metrics.first_token_time > found.metrics.arrival_time  # type: ignore[operator]


def test_outputs_that_nobody_received_come_from_the_restored_engine(runs: Runs, tmp_path: Path) -> None:
    engine = runs.engine(overlap=True)
    first = engine.add_request({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1))
    second = engine.add_request({"prompt_token_ids": [1, 2, 4]}, SamplingParams(max_tokens=1))
    engine.open_mailbox(second, every=False)
    assert engine.step() == []
    engine.save(tmp_path)  # which reads the step back: both requests end
    restored = restore(runs, tmp_path)
    assert restored.has_unfinished()
    outputs = restored.step()
    assert sorted(output.request_id for output in outputs) == [first, second]
    assert all(output.finished for output in outputs)
    assert outputs[0].outputs == engine.step()[0].outputs
    assert restored.add_request({"prompt_token_ids": [1]}) not in (first, second)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_registered_prefixes_survive(runs: Runs, tmp_path: Path, keep_kv: bool) -> None:
    engine = runs.engine()
    (prompt,) = runs.prompts(12)
    engine.register_prefix({"prompt_token_ids": prompt}, cache_salt="s")
    engine.save(tmp_path, keep_kv=keep_kv)
    restored = restore(runs, tmp_path)
    for _ in drain(restored):
        pass
    (prefix,) = restored.prefixes
    assert (prefix.token_ids, prefix.cache_salt) == (tuple(prompt), "s")
    request_id = restored.add_request({"prompt_token_ids": [*prompt, 4]}, GREEDY_ONE, cache_salt="s")
    (output,) = [output for output in drain(restored) if output.finished]
    assert output.request_id == request_id and output.metrics and output.metrics.num_cached_tokens == 12
    restored.unregister_prefix(prefix)
    assert restored.stats().usage.free == restored.pool_info.num_slots


GREEDY_ONE = SamplingParams(max_tokens=2, temperature=0.0)


# ---------------------------------------------------------------------- damage


@pytest.fixture
def two_snapshots(runs: Runs, tmp_path: Path) -> list[Path]:
    engine, _ = start(runs, runs.prompts(13, 16, 7, 21, 5), **PRESSED)
    for _ in range(3):
        for _ in range(3):
            engine.step()
        engine.save(tmp_path)
    found = list_snapshots(tmp_path)
    assert [path.name for path in found] == ["00000002", "00000003"]  # the last two are kept
    return found


def test_any_damage_is_seen_and_the_snapshot_before_is_used(runs: Runs, two_snapshots: list[Path]) -> None:
    older, newer = two_snapshots
    rng = random.Random(0)
    for path in sorted(path for path in newer.rglob("*") if path.is_file()):
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(flipped), data[: rng.randrange(len(data))], None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.warns(RuntimeWarning, match=rf"{path.name}.*: the snapshot before, .*{older.name}, is used"):
                engine = Engine.restore(newer.parent, model=runs.model, progress=False)
            assert (
                engine.scheduler.num_steps
                < json.loads((older / "state.json").read_text())["scheduler"]["num_steps"] + 1
            )
            with pytest.raises(SnapshotError, match=r"^no snapshot can be used in .*00000003: "):
                Engine.restore(newer, model=runs.model)
            path.write_bytes(data)
    restore(runs, newer.parent)


def test_an_unfinished_snapshot_is_not_one(runs: Runs, two_snapshots: list[Path]) -> None:
    root = two_snapshots[0].parent
    (root / ".unfinished-00000009").mkdir()
    restored = restore(runs, root)
    restored.save(root)
    assert [path.name for path in sorted(root.iterdir())] == ["00000003", "00000004"]


def test_what_is_no_snapshot(runs: Runs, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path(__file__)):
        with pytest.raises(SnapshotError, match=r"^no snapshot can be used in .*manifest.json cannot be read"):
            Engine.restore(path, model=runs.model)


def rewrite(folder: Path, change: Any) -> None:
    """Changes a snapshot's state as somebody would who knows the format."""
    state, arrays = snapshot_files.read_snapshot(folder)
    change(state)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    snapshot_files._write_files(folder, state, arrays)


def test_another_version_model_or_configuration_is_refused(runs: Runs, two_snapshots: list[Path]) -> None:
    newest = two_snapshots[-1]
    other = LoadedModel(TINY, init_params(TINY, seed=1), None, {"name": "other"})
    with pytest.raises(
        SnapshotError, match=r"of other weights \(\{'name': 'random'\}\) than those of \{'name': 'other'\}"
    ):
        Engine.restore(newest, model=other)
    wider = replace(TINY, intermediate_size=64)
    with pytest.raises(SnapshotError, match=r"of another model .*: its intermediate_size is 96, but .* has 64"):
        Engine.restore(newest, model=LoadedModel(wider, init_params(wider, seed=0), None, {"name": "wider"}))
    for name, value in (("block_size", 8), ("num_blocks", 31), ("preemption", "auto"), ("max_num_seqs", 3)):
        with pytest.raises(SnapshotError, match=rf"an engine with {name}=.*, but config has {name}={value!r}"):
            Engine.restore(newest, model=runs.model, config=runs.config(**{**PRESSED, name: value}))
    restore(runs, newest, config=runs.config(**{**PRESSED, "overlap": False, "seed": 4}))
    with pytest.raises(ModelError, match="unknown model 'random'"):
        Engine.restore(newest)
    rewrite(newest, lambda state: state.update(version=2))
    with pytest.raises(SnapshotError, match=r"is a snapshot of version 2, but this program reads version 1$"):
        Engine.restore(newest, model=runs.model)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("scheduler"),
        lambda state: state.update(clock="noon"),
        lambda state: state.update(trackers=[["nobody", {}]]),
        lambda state: state.update(config={}),
        lambda state: state["config"].update(block_size="4"),
        lambda state: state["scheduler"]["allocator"]["pool"]["ref_counts"].reverse(),
        lambda state: state["scheduler"]["allocator"]["swap_space"]["tables"].append([99, 3, [1]]),
    ],
)
def test_nonsense_with_the_right_sums_is_refused(runs: Runs, two_snapshots: list[Path], change: Any) -> None:
    rewrite(two_snapshots[-1], change)
    with pytest.raises((SnapshotError, ConfigError)):
        Engine.restore(two_snapshots[-1], model=runs.model, progress=False)


def test_the_configuration_that_a_run_was_begun_with_does_to_resume_it(runs: Runs, tmp_path: Path) -> None:
    config = runs.config(num_blocks=None, pool_bytes=1 << 20, max_model_len=None)
    engine = Engine(runs.model, config, progress=False)
    engine.add_request({"prompt_token_ids": [1, 2, 3]}, GREEDY)
    engine.save(tmp_path)
    restored = Engine.restore(tmp_path, runs.model, config, progress=False)
    assert restored.pool_info.num_blocks == engine.pool_info.num_blocks
    with pytest.raises(SnapshotError, match="an engine with pool_bytes=1048576, but config has pool_bytes=2097152"):
        Engine.restore(tmp_path, runs.model, replace(config, pool_bytes=2 << 20))


def test_one_changed_weight_is_seen(runs: Runs, two_snapshots: list[Path]) -> None:
    params = jax.tree.map(lambda leaf: leaf, runs.model.params)
    leaves, tree = jax.tree.flatten(params)
    last = max(range(len(leaves)), key=lambda index: leaves[index].size)
    leaves[last] = leaves[last].at[-1, -1].add(1e-3)
    other = LoadedModel(TINY, jax.tree.unflatten(tree, leaves), None, {"name": "other"})
    with pytest.raises(SnapshotError, match="of other weights"):
        Engine.restore(two_snapshots[-1], model=other, progress=False)


def test_bad_arguments_are_named(runs: Runs, tmp_path: Path) -> None:
    engine = runs.engine()
    for path in (b"x", 5, None, "", "a\0b", "/x/\ud800"):
        for use in (engine.save, lambda path: Engine.restore(path, model=runs.model)):
            with pytest.raises(SnapshotError, match=r"^path=.* is not allowed: it must be the path of a folder$"):
                use(path)  # type: ignore[arg-type]
    engine.save(tmp_path)
    with pytest.raises(SnapshotError, match="File name too long"):
        Engine.restore("a" * 300, model=runs.model)
    with pytest.raises(ConfigError, match="keep_kv='no' is not allowed"):
        engine.save(tmp_path, keep_kv="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model='smollm2-135m' must be a LoadedModel"):
        Engine.restore(tmp_path, model="smollm2-135m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be an EngineConfig, or None"):
        Engine.restore(tmp_path, runs.model, config={})  # type: ignore[arg-type]


def test_what_else_lies_in_the_folder_is_let_alone(runs: Runs, tmp_path: Path) -> None:
    for name in ("2022", "00000002", "20240101"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious.txt").write_text("data")
    engine = runs.engine()
    saved = [engine.save(tmp_path).name for _ in range(4)]
    assert saved == ["00000001", "00000003", "00000004", "00000005"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000004", "00000005", "2022", "20240101"]
    assert list_snapshots(tmp_path)[-1].name == "00000005"


def test_a_prefix_that_was_being_registered_leaves_nothing(runs: Runs, tmp_path: Path) -> None:
    engine = runs.engine(snapshot_path=str(tmp_path), snapshot_every=1, max_num_batched_tokens=8)
    engine.register_prefix({"prompt_token_ids": runs.prompts(32)[0]})
    for saved in list_snapshots(tmp_path):
        restored = Engine.restore(saved, model=runs.model, progress=False)
        assert [output.request_id for output in drain(restored)] == []
        assert restored.stats().usage.free == restored.pool_info.num_slots and restored.prefixes == []
        restored.reset_prefix_cache()


def test_numbers_of_numpy_are_written(runs: Runs, tmp_path: Path) -> None:
    engine = runs.engine()
    engine.add_request({"prompt_token_ids": [1, 2]}, GREEDY_ONE, arrival_time=np.float32(1.5))  # type: ignore[arg-type]
    engine.add_request({"prompt_token_ids": [1, 2]}, GREEDY_ONE, arrival_time=np.int64(2))  # type: ignore[arg-type]
    engine.save(tmp_path)


def test_a_stream_dropped_while_the_engine_is_saved_ends_behind_it(runs: Runs, tmp_path: Path) -> None:
    llm = LLM(runs.model, runs.config(), progress=False)
    runs.share(llm.engine)
    streams = [llm.stream({"prompt_token_ids": [1, 2, number]}, GREEDY) for number in range(1, 4)]
    next(streams[0])
    with llm.engine._lock:
        streams.clear()  # as the garbage collector might, inside of anything
        assert len(llm.engine._trackers.by_request) == 3
    assert not llm.engine.has_unfinished()


# ---------------------------------------------------------------------- periodic snapshots, and disks


def test_snapshots_every_few_steps(runs: Runs, prompts: list[list[int]], tmp_path: Path) -> None:
    engine, names = start(runs, prompts, snapshot_path=str(tmp_path), snapshot_every=4)
    saved: list[str] = []
    for _ in range(14):
        engine.step()
        saved = [path.name for path in list_snapshots(tmp_path)]
    assert saved == ["00000002", "00000003"]
    expected = {output.request_id: output for output in drain(engine) if output.finished}
    again = restore(runs, tmp_path)
    found = {output.request_id: output for output in drain(again) if output.finished}
    assert set(names) <= set(found) | set(expected)
    assert all(results([found[name]]) == results([expected[name]]) for name in set(found) & set(expected))


def test_a_path_that_cannot_be_written_is_said_at_the_start(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"snapshot_path='.*' is not allowed: it must be a folder that can be"):
            runs.engine(snapshot_path=str(path), snapshot_every=5)
    with pytest.raises(ConfigError, match="snapshot_every=5 is not allowed: .* where snapshot_path=None is a folder"):
        runs.config(snapshot_every=5)
    with pytest.raises(ConfigError, match="event_log='.*' is not allowed"):
        runs.engine(event_log=str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="snapshot_path='' is not allowed"):
        runs.config(snapshot_path="", snapshot_every=5)


def test_a_full_disk_does_not_stop_the_run(runs: Runs, prompts: list[list[int]], tmp_path: Path) -> None:
    engine, names = start(runs, prompts, snapshot_path=str(tmp_path), snapshot_every=5)
    expected = {output.request_id: output for output in drain(start(runs, prompts)[0]) if output.finished}
    for _ in range(6):
        engine.step()
    assert len(list_snapshots(tmp_path)) == 1

    sizes = [path.stat().st_size for path in list_snapshots(tmp_path)[0].rglob("*") if path.is_file()]
    for limit in (100, sorted(sizes)[-2] + 1):  # not even the state, and all but the arrays
        with (
            file_size_limit(limit),
            pytest.raises(SnapshotError, match=r"^no snapshot was written to .*: File too large$"),
        ):
            engine.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["00000001"], "what there was is still there"
    with (
        file_size_limit(100),
        pytest.warns(RuntimeWarning, match=r"no snapshot was .*: File too large; the run goes on"),
    ):
        found = {output.request_id: output for output in drain(engine) if output.finished}
    assert tokens(found, names) == tokens(expected, names)
    engine.save(tmp_path)


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Files cannot grow beyond so many bytes: to who writes, a disk that is full."""
    resource = pytest.importorskip("resource", reason="only Unix limits file sizes")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_snapshot_that_fails_for_whatever_reason_does_not_stop_the_run(
    runs: Runs, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, names = start(runs, prompts, snapshot_path=str(tmp_path), snapshot_every=9)
    monkeypatch.setattr(snapshot_files, "_write_files", lambda *args: 1 / 0)
    with pytest.warns(RuntimeWarning, match=r"^no snapshot was written: ZeroDivisionError.*; the run goes on$"):
        found = [output.request_id for output in drain(engine) if output.finished]
    assert sorted(found) == sorted(names) and not list_snapshots(tmp_path)


def test_a_warm_engine_saves_without_compiling(runs: Runs, prompts: list[list[int]], tmp_path: Path) -> None:
    from pagedjax.device.programs import no_new_compiles

    engine, _ = start(runs, prompts, snapshot_path=str(tmp_path), snapshot_every=3)
    engine.warmup(progress=False)
    with no_new_compiles():
        for _ in range(8):
            engine.step()
        engine.save(tmp_path, keep_kv=False)
