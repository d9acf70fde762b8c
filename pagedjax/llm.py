"""`LLM`: a model, its tokenizer and an engine behind `generate`, `chat` and `stream`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pagedjax.config import EngineConfig
from pagedjax.device.compilation_cache import use_compilation_cache
from pagedjax.engine import Engine
from pagedjax.errors import InvalidRequest
from pagedjax.intake import check_config
from pagedjax.models.loader import LoadedModel, check_model_name, load_model
from pagedjax.models.progress import bar
from pagedjax.prefixes import RegisteredPrefix
from pagedjax.prompt import Prompt
from pagedjax.request import BeamSearchParams, RequestOutput, SamplingParams, check_text
from pagedjax.scalars import shown

Message = Mapping[str, str]


class LLM:
    """Text in, text out, through a paged KV cache.

    Args:
        model: a known name ("smollm2-135m"), a Hugging Face id, a local folder or .gguf file, or a model loaded before.
        config: everything else; see `EngineConfig`.
        progress: say on stderr what is loaded and compiled, where that takes longer than a second.

    Raises:
        ModelError: the model is unknown, or its files are damaged.
        DownloadError: it is not on this machine and cannot be downloaded.
        ConfigError: the configuration contradicts the model or the memory.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "smollm2-135m",
        config: EngineConfig | None = None,
        progress: bool = True,
    ) -> None:
        config = check_config(config)
        use_compilation_cache()
        if not isinstance(model, LoadedModel):
            check_model_name(model)
            model = load_model(model, dtype=config.dtype, progress=progress)
        self.engine = Engine(model, config, progress)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts, as many at the same time as fit.

        Args:
            prompts: texts, or {"prompt_token_ids": [...]}; one or a list.
            params: one for all, or one per prompt.
            progress: a bar on stderr.
            cache_salt: only requests of the same salt share cached blocks.

        Returns:
            One output per prompt, in their order.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be served; nothing was started then.
            KeyboardInterrupt: on Ctrl-C; the prompts are aborted and the engine is ready for more.
        """
        batch = _as_list(prompts)
        return self._run(batch, _one_per_prompt(SamplingParams, params, len(batch)), progress, cache_salt)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams] | None = None,
        progress: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Searches for the best outputs of all prompts, as many at the same time as fit.

        Args:
            prompts, progress, cache_salt: as in `generate`.
            params: one for all, or one per prompt.

        Returns:
            One output per prompt, in their order, each with `beam_width` outputs, best first, with their `score`. Fewer
            only where fewer exist.

        Raises:
            InvalidRequest, KeyboardInterrupt: as in `generate`.
        """
        batch = _as_list(prompts)
        return self._run(batch, _one_per_prompt(BeamSearchParams, params, len(batch)), progress, cache_salt)

    def _run(
        self, batch: list[Prompt], params: list[Any], progress: bool, cache_salt: str | None
    ) -> list[RequestOutput]:
        ids: list[str] = []
        try:
            for prompt, p in zip(batch, params, strict=True):
                ids.append(self.engine.add_request(prompt, p, cache_salt=cache_salt))
                self.engine.open_mailbox(ids[-1], every=False)
            with bar(None, "requests", progress, total=len(ids), unit="") as ticks:
                return [self._last_output(request_id, ticks) for request_id in ids]
        finally:
            for request_id in ids:
                self.engine.close_mailbox(request_id)

    def _last_output(self, request_id: str, ticks: Any) -> RequestOutput:
        while not (output := self.engine.receive(request_id)).finished:
            pass
        ticks.update()
        return output

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of several, through the model's chat template.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            params, progress, cache_salt: as in `generate`.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages={shown(messages)} must be a list of messages, or a list of such lists")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, params, progress, cache_salt)

    def chat_prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        """A conversation as a prompt for `generate`, `stream` or `Engine.add_request`.

        Raises:
            InvalidRequest: the model has no chat template, or the messages are not of its form.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template: use generate() with a prompt of your own")
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise InvalidRequest(f"messages={shown(messages)} must be a list of messages")
        if not messages:
            raise InvalidRequest("messages is empty: it must hold at least one message")
        for message in messages:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise InvalidRequest(
                    f'{shown(message)} is no chat message: it must be {{"role": "...", "content": "..."}}'
                )
            for key in ("role", "content"):
                check_text(key, message[key])
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from None
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"prompt": text, "prompt_token_ids": token_ids}

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, cache_salt: str | None = None
    ) -> RequestStream:
        """Yields the request's state after each of its tokens, text so far; ends with it.

        Closing or dropping the stream early ends the request. Several streams may be read in any order, also from
        different threads: each gets its own outputs.
        """
        (params,) = _one_per_prompt(SamplingParams, params, 1)
        return RequestStream(self.engine, self.engine.add_request(prompt, params, cache_salt=cache_salt))

    def register_prefix(self, prefix: Prompt, cache_salt: str | None = None) -> RegisteredPrefix:
        """Computes what prompts to come begin with and keeps its full blocks; see `Engine.register_prefix`."""
        return self.engine.register_prefix(prefix, cache_salt)

    def unregister_prefix(self, prefix: RegisteredPrefix) -> None:
        """Lets go of a registered prefix. Raises InvalidRequest if it is not registered."""
        self.engine.unregister_prefix(prefix)

    def reset_prefix_cache(self) -> None:
        """Forgets the content of all cached blocks. Raises BlocksInUse while anything holds blocks."""
        self.engine.reset_prefix_cache()


class RequestStream(Iterator[RequestOutput]):
    """The states of one request, one a token; see `LLM.stream`."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._open = True
        engine.open_mailbox(request_id, every=True)

    def __next__(self) -> RequestOutput:
        """The next state, after as many steps as it takes."""
        if not self._open:
            raise StopIteration
        output = self._engine.receive(self.request_id)
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Ends the request, if it has not ended."""
        if self._open:
            self._open = False
            self._engine.close_mailbox(self.request_id)

    def __del__(self) -> None:
        self.close()


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts={shown(prompts)} must be a prompt or a list of prompts")
    return list(prompts)


def _one_per_prompt(kind: type, params: Any, num_prompts: int) -> list[Any]:
    """As many parameters as prompts. Raises InvalidRequest unless all are of one kind."""
    if params is None or isinstance(params, kind):
        return [params or kind()] * num_prompts
    if not isinstance(params, list | tuple):
        raise InvalidRequest(f"params={shown(params)} must be {kind.__name__}, or a list of one per prompt")
    if len(params) != num_prompts:
        raise InvalidRequest(f"{len(params)} {kind.__name__} for {num_prompts} prompts: give one, or one per prompt")
    for one in params:
        if not isinstance(one, kind):
            raise InvalidRequest(f"params={shown(one)} must be {kind.__name__}")
    return list(params)
