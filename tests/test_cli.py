"""The commands on an engine that answers from a script; tests/test_cli_model.py runs them on a model."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from pagedjax.cli import main
from pagedjax.cli.chat import HELP
from pagedjax.errors import DownloadError, RequestTooLong
from pagedjax.request import CompletionOutput, Logprob, RequestOutput


def state(request_id, prompt, text, reason=None, stop_reason=None):
    completion = CompletionOutput(0, text, list(range(len(text))), None, None, reason, stop_reason)
    return RequestOutput(request_id, prompt, [1], [completion], finished=reason is not None)


class FakeEngine:
    """Gives one more letter of each answer a step; raises what a script's entry is, if that is an exception."""

    def __init__(self, answers):
        self.answers = answers
        self.compile_seconds = 0.0
        self.requests = {}
        self.aborted = []

    def add_request(self, prompt, params):
        request_id = f"r{len(self.requests)}"
        self.requests[request_id] = (prompt, list(self.answers[len(self.requests)]), "")
        return request_id

    def has_unfinished(self):
        return any(letters for _, letters, _ in self.requests.values())

    def step(self):
        for _, letters, _ in self.requests.values():
            if letters and isinstance(letters[0], BaseException):
                raise letters.pop(0)
        outputs = []
        for request_id, (prompt, letters, text) in list(self.requests.items()):
            if not letters:
                continue
            letter = letters.pop(0)
            self.requests[request_id] = (prompt, letters, text + letter)
            outputs.append(state(request_id, prompt, text + letter, None if letters else "stop"))
        return outputs

    def stats(self):
        return SimpleNamespace(compile_seconds=self.compile_seconds)

    def is_unfinished(self, request_id):
        return bool(self.requests[request_id][1])

    def abort(self, request_id):
        self.aborted.append(request_id)
        prompt, _, text = self.requests[request_id]
        self.requests[request_id] = (prompt, [], text)
        return state(request_id, prompt, text, "abort")


@pytest.fixture
def fake(monkeypatch):
    """Puts a scripted model in the place of LLM: `fake.answers` is one script a request, letter by letter."""
    made = SimpleNamespace(answers=[], llm=None, closed=0, params=[], conversations=[])

    class FakeLLM:
        def __init__(self, model, config):
            if isinstance(made.answers, Exception):
                raise made.answers
            made.llm, self.model, self.config = self, model, config
            self.engine = FakeEngine(made.answers)

        def chat_prompt(self, messages):
            made.conversations.append([(message["role"], message["content"]) for message in messages])
            return {"prompt_token_ids": [1, 2, 3]}

        def stream(self, prompt, params):
            made.params.append(params)
            self.engine.add_request(prompt, params)
            try:
                while self.engine.has_unfinished():
                    yield from self.engine.step()
            finally:
                made.closed += 1
                for request_id in filter(self.engine.is_unfinished, self.engine.requests):
                    self.engine.abort(request_id)

    monkeypatch.setitem(sys.modules, "pagedjax.llm", SimpleNamespace(LLM=FakeLLM))
    return made


def type_in(monkeypatch, *lines, tty=False):
    stdin = io.StringIO("".join(f"{line}\n" for line in lines))
    stdin.isatty = lambda: tty
    monkeypatch.setattr(sys, "stdin", stdin)


def test_one_prompt_prints_its_text_and_nothing_else_to_stdout(fake, capsys):
    fake.answers = ["Paris."]
    assert main(["generate", "The capital of France is", "--model", "some/model", "--block-size", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Paris.\n"
    assert captured.err.startswith("6 tokens in ")
    assert fake.llm.model == "some/model" and fake.llm.config.block_size == 4
    assert fake.params[0].max_tokens == 128


def test_compiling_is_not_counted_in_the_speed_and_said(fake, capsys, monkeypatch):
    fake.answers = ["Paris."]
    clock = iter([100.0, 115.0])
    monkeypatch.setattr("pagedjax.cli.generate.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(FakeEngine, "stats", lambda self: SimpleNamespace(compile_seconds=12.0))
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().err == "6 tokens in 3.0 s, 2.0 tokens/s (compiling, 12.0 s, is not counted)\n"


@pytest.mark.parametrize("argv", [["generate", "fine", "caf\udce9"], ["chat", "--system", "caf\udce9"]])
def test_text_that_is_no_utf8_is_refused_before_the_model_is_loaded(fake, capsys, argv):
    assert main(argv) == 1 and fake.llm is None
    error = capsys.readouterr().err
    assert "'caf\\udce9' is not allowed" in error and "no UTF-8" in error and error.count("\n") == 1


def test_logprobs_are_printed_a_line_a_token(fake, capsys, monkeypatch):
    own, other = Logprob(-0.25, 1, " Paris"), Logprob(-2.5, 2, " the\n")
    far, top = Logprob(-9.0, 77, None), Logprob(-0.125, 1, ".")
    output = state("r0", "x", "Paris?", "stop")
    output.outputs[0].token_ids, output.outputs[0].logprobs = [5, 7], [{5: own, 6: other}, {7: far, 8: top}]
    output.prompt_token_ids, output.prompt_logprobs = [1, 5], [None, {5: own}]
    expected = (
        "prompt token\n"
        "  ' Paris'  -0.250  #1  ' Paris' -0.250\n"
        "output token\n"
        "  ' Paris'  -0.250   #1  ' Paris' -0.250, ' the\\n' -2.500\n"
        "  token 7   -9.000  #77  '.' -0.125\n"
    )
    fake.answers = [["x"], ["y"]]
    monkeypatch.setattr(FakeEngine, "step", lambda self: self.requests.clear() or [output])
    assert main(["generate", "x", "--logprobs", "2"]) == 0
    assert capsys.readouterr().out == f"Paris?\n{expected}"
    assert main(["generate", "x", "y", "--logprobs", "2"]) == 0
    assert capsys.readouterr().out == f"[1] x\nParis?\n{expected}\n"
    type_in(monkeypatch, "hello")
    assert main(["chat", "--logprobs", "2"]) == 0
    assert capsys.readouterr().out == f"Paris?\n{expected}"


def test_several_prompts_are_printed_with_their_number_as_they_end(fake, capsys):
    fake.answers = ["a long one", "short"]
    assert main(["generate", "first prompt", "second prompt"]) == 0
    assert capsys.readouterr().out == "[2] second prompt\nshort\n\n[1] first prompt\na long one\n\n"


def test_samples_are_numbered_within_their_prompt(fake, capsys, monkeypatch):
    output = state("r0", "x", "one", "length")
    second = CompletionOutput(
        1, "two\n", [3, 4], -1.0, [{3: Logprob(-0.5, 1, "t")}, {4: Logprob(-0.5, 2, "wo")}], "stop"
    )
    output.outputs.append(second)
    fake.answers = [["x"]]
    monkeypatch.setattr(FakeEngine, "step", lambda self: self.requests.clear() or [output])
    assert main(["generate", "x", "--n", "2"]) == 0
    captured = capsys.readouterr()
    logprobs = "output token of sample 2\n  't'   -0.500  #1  't' -0.500\n  'wo'  -0.500  #2\n"
    assert captured.out == f"[1] x\n(1.1) one\n(1.2) two\n\n{logprobs}\n"
    assert captured.err.startswith("5 tokens in ")


def test_ctrl_c_keeps_what_one_prompt_has_printed(fake, capsys):
    fake.answers = [["P", "a", KeyboardInterrupt()]]
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr().out == "Pa\n"
    assert fake.closed == 1


def test_ctrl_c_prints_what_several_prompts_have_and_aborts_the_rest(fake, capsys):
    fake.answers = [["a", "b", "c"], ["d"], ["e", "f", KeyboardInterrupt(), "g"]]
    assert main(["generate", "x", "y", "z"]) == 130
    assert capsys.readouterr().out == "[2] y\nd\n\n[1] x\nab\n\n[3] z\nef\n\n"
    assert fake.llm.engine.aborted == ["r0", "r2"]


def test_ctrl_c_while_the_model_loads_leaves_quietly(fake, capsys, monkeypatch):
    monkeypatch.setattr(fake, "answers", [])
    monkeypatch.setattr(sys.modules["pagedjax.llm"], "LLM", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr() == ("", "pagedjax: interrupted\n")


def test_a_request_that_failed_is_named_and_gives_exit_1(fake, capsys, monkeypatch):
    fake.answers = ["ab", "c"]
    monkeypatch.setattr(
        FakeEngine,
        "step",
        lambda self: [
            state("r0", "x", "ab", "stop"),
            self.requests.clear() or state("r1", "y", "", "error", "the logits hold NaN"),
        ],
    )
    assert main(["generate", "x", "y"]) == 1
    captured = capsys.readouterr()
    assert "[1] x\nab\n" in captured.out
    assert "pagedjax: request r1: the logits hold NaN\n" in captured.err


def test_no_model_to_be_had_is_one_sentence_and_exit_1(fake, capsys):
    fake.answers = DownloadError("smollm2-135m is not in the cache and pip cannot download it")
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr() == ("", "pagedjax: smollm2-135m is not in the cache and pip cannot download it\n")


def test_chat_remembers_both_sides_until_reset(fake, capsys, monkeypatch):
    fake.answers = ["Hi!", "Blue.", "Who?"]
    type_in(monkeypatch, "hello", "", "  what colour?  ", "/reset", "and now?")
    assert main(["chat", "--system", "Be brief.", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hi!\nBlue.\nWho?\n"
    system = ("system", "Be brief.")
    assert fake.conversations == [
        [system, ("user", "hello")],
        [system, ("user", "hello"), ("assistant", "Hi!"), ("user", "what colour?")],
        [system, ("user", "and now?")],
    ]
    assert fake.params[0].temperature == 0.0


def test_chat_leaves_at_quit_and_says_what_it_does_not_know(fake, capsys, monkeypatch):
    fake.answers = ["never asked"]
    type_in(monkeypatch, "/help", "/quit", "hello")
    assert main(["chat"]) == 1
    error = capsys.readouterr().err
    assert "no such command: '/help'" in error and "/reset" in error and "/quit" in error
    assert fake.params == []


def test_chat_goes_on_after_ctrl_c_with_the_part_it_has(fake, capsys, monkeypatch):
    fake.answers = [["H", "i", KeyboardInterrupt(), "never"], "ok"]
    type_in(monkeypatch, "hello", "more")
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "Hi\nok\n"
    assert fake.conversations[1] == [("user", "hello"), ("assistant", "Hi"), ("user", "more")]


@pytest.mark.parametrize("tty", [False, True])
def test_chat_outlives_a_message_that_is_refused_and_a_pipe_learns_of_it(fake, capsys, monkeypatch, tty):
    fake.answers = ["fine"]
    type_in(monkeypatch, "far too long", "short", tty=tty)
    add_request = FakeEngine.add_request
    refusals = [RequestTooLong("a prompt of 9000 tokens, but max_model_len=8192")]

    def refuse_once(self, prompt, params):
        if refusals:
            raise refusals.pop()
        return add_request(self, prompt, params)

    monkeypatch.setattr(FakeEngine, "add_request", refuse_once)
    assert main(["chat"]) == (0 if tty else 1)
    captured = capsys.readouterr()
    assert captured.out == (f"{HELP}\n> > fine\n> " if tty else "fine\n")
    assert captured.err == "pagedjax: a prompt of 9000 tokens, but max_model_len=8192\n"
    assert fake.conversations[1] == [("user", "short")]
