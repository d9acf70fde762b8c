"""`make demo`: several questions at once, answered by a real model out of one paged pool."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagedjax.cli.loading import llm_class
from pagedjax.config import EngineConfig
from pagedjax.errors import PagedJaxError
from pagedjax.request import RequestOutput, SamplingParams
from pagedjax.tables import format_table

if TYPE_CHECKING:
    from pagedjax.engine import Engine
    from pagedjax.llm import LLM

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "Why do leaves change colour in autumn?",
    "What does a compiler do?",
    "Give me three tips for learning a language.",
    "What is photosynthesis?",
    "Tell me a one-sentence story about a robot.",
)
CONTIGUOUS_TOKENS = 2048
# A third of what contiguous reservations would take; and a small set of programs, since the first start compiles them.
CONFIG = EngineConfig(
    pool_bytes=256 << 20, max_model_len=CONTIGUOUS_TOKENS, max_num_seqs=len(QUESTIONS), max_num_batched_tokens=256
)


def answer_all(llm: LLM, questions: tuple[str, ...], params: SamplingParams) -> list[RequestOutput]:
    """Asks every question at once; prints each answer when it is complete."""
    engine = llm.engine
    asked = {
        engine.add_request(llm.chat_prompt([{"role": "user", "content": question}]), params): question
        for question in questions
    }
    outputs: list[RequestOutput] = []
    with tqdm(total=len(questions), desc="answering", unit="answer", disable=None, leave=False) as bar:
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    outputs.append(output)
                    bar.update()
                    bar.write(f"> {asked[output.request_id]}\n{output.outputs[0].text.strip()}\n")
    return outputs


def memory_row(engine: Engine, num_requests: int, seconds: float) -> dict[str, object]:
    """What the answers took, and what a contiguous reservation for each request would have taken instead.

    The reservation is that of the systems before paging (paper section 3.1): room for the longest text a request might
    become, here 2048 tokens, held from its first token to its last.
    """
    stats, pool = engine.stats(), engine.pool_info
    contiguous = num_requests * -(-CONTIGUOUS_TOKENS // pool.block_size)
    return {
        "requests at once": num_requests,
        "output tokens": stats.output_tokens,
        "tokens per second": stats.output_tokens / seconds,
        "KV utilisation": f"{stats.kv_utilisation:.1%}",
        f"blocks used at peak (of {pool.block_size} tokens)": stats.peak_blocks,
        "MiB used at peak": stats.peak_blocks * pool.bytes_per_block / 2**20,
        f"blocks, {CONTIGUOUS_TOKENS} tokens reserved per request": contiguous,
        "MiB, reserved so": contiguous * pool.bytes_per_block / 2**20,
        "times as much": contiguous / stats.peak_blocks,
    }


def main() -> int:
    """Exit status: 0; 1 with one sentence when there is no model to be had; 130 after Ctrl-C."""
    try:
        llm = llm_class()("smollm2-135m", CONFIG)
        llm.engine.warmup()
        llm.engine.reset_stats()
        start = time.perf_counter()
        outputs = answer_all(llm, QUESTIONS, SamplingParams(temperature=0.0, max_tokens=128))
        print(format_table([memory_row(llm.engine, len(outputs), time.perf_counter() - start)]))
    except PagedJaxError as error:
        print(f"pagedjax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pagedjax: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
