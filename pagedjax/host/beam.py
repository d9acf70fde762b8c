"""Beam search over one request's sequences, as `transformers` defines it (paper section 4.4).

A step is given the best continuations of all beams together, best first. Those among the best `beam_width` of them that
end (by a stop token, or because no further token is allowed) become hypotheses, of which the best `beam_width` are
kept; the best of those that do not end go on as beams.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from pagedjax.request import BeamSearchParams


class BeamCandidate(NamedTuple):
    """A continuation of a beam by one token.

    Attributes:
        beam: index of the beam.
        logprob: of the whole output, this token included: the sum of its tokens' log-probabilities.
    """

    beam: int
    token_id: int
    logprob: float


class Hypothesis(NamedTuple):
    """A finished output.

    Attributes:
        score: logprob / length ** length_penalty, the length in output tokens, the stop token among them.
        logprob: the sum of its tokens' log-probabilities.
        finish_reason: "stop" or "length".
    """

    score: float
    logprob: float
    token_ids: tuple[int, ...]
    finish_reason: str


def num_candidates(beam_width: int, num_stop_ids: int) -> int:
    """Continuations that a step must look at, so that enough of them go on whichever of them end."""
    return max(2, 1 + num_stop_ids) * beam_width


@dataclass(slots=True)
class BeamSearch:
    """What a beam search remembers between steps, besides the beams' tokens.

    Attributes:
        max_tokens: output tokens at most.
        logprobs: of the beams, in the order of their sequences.
        hypotheses: finished outputs, best first, `beam_width` at most.
    """

    params: BeamSearchParams
    stop_ids: frozenset[int]
    max_tokens: int
    logprobs: list[float] = field(default_factory=lambda: [0.0])
    hypotheses: list[Hypothesis] = field(default_factory=list)

    def advance(self, candidates: List[BeamCandidate], outputs: List[List[int]]) -> list[BeamCandidate]:
        """Takes a step's best continuations.

        Args:
            candidates: best first; see `num_candidates`.
            outputs: output tokens of each beam so far, all as many.

        Returns:
            The continuations that go on as beams, best first; none when the search is over.
        """
        width, length = self.params.beam_width, len(outputs[0]) + 1
        survivors: list[BeamCandidate] = []
        for rank, candidate in enumerate(candidates):
            stops = candidate.token_id in self.stop_ids
            if stops or length == self.max_tokens:
                if rank < width:
                    tokens = (*outputs[candidate.beam], candidate.token_id)
                    self._finish(candidate.logprob, tokens, "stop" if stops else "length")
            elif len(survivors) < width:
                survivors.append(candidate)
        if self._is_over(survivors, length):
            survivors = []
        self.logprobs = [candidate.logprob for candidate in survivors]
        return survivors

    def _finish(self, logprob: float, tokens: tuple[int, ...], reason: str) -> None:
        score = logprob / len(tokens) ** self.params.length_penalty
        self.hypotheses.append(Hypothesis(score, logprob, tokens, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the first stays first
        del self.hypotheses[self.params.beam_width :]

    def _is_over(self, survivors: List[BeamCandidate], length: int) -> bool:
        """Whether no beam can go on, or none that does may still beat the worst hypothesis kept."""
        params = self.params
        if not survivors:
            return True
        if len(self.hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        # "never" asks for the best that a beam could still reach. Logprobs only fall, so with a penalty that favours
        # long outputs that is to stay as it is up to the last token.
        longest = params.early_stopping == "never" and params.length_penalty > 0
        reach = survivors[0].logprob / (self.max_tokens if longest else length) ** params.length_penalty
        return reach <= self.hypotheses[-1].score
