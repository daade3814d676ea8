"""The policy's own verdict on a whole reply: its probability of yes when it is asked whether the reply is right.

It is the score of a generative verifier without reasoning (GenRM, arXiv 2408.15240), and the P(True) of arXiv
2207.05221, here relative to both verdicts, as the rest of the probability is not about the reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.protocols import Model
from posttrain.engines.search.verdict_tokens import verdict_tokens
from posttrain.models.losses.continuations import continuation_logp
from posttrain.models.tokenizer.tokenizer import Tokenizer


class SelfVerifier:
    """Value of a whole reply: P(yes) / (P(yes) + P(no)) after prompt, reply and question, each word in both spellings."""

    def __init__(self, model: Model, tokenizer: Tokenizer, question: str) -> None:
        """Raises UserError if the tokenizer cannot write one of the verdicts."""
        self.model, self.tokenizer, self.question = model, tokenizer, question
        self._yes, self._no = verdict_tokens(tokenizer)

    def __call__(self, context: Mapping[str, Any], reply: str) -> float | None:
        """Return the value of a reply; None if the model's context has no room for it with the question. `context`: its
        prompt, {"prompt": text} or {"messages": [...]}.
        """
        words = [*self._yes, *self._no]
        before = self.tokenizer.encode(self._asked(context, reply), start=True)
        if len(before) + max(map(len, words)) > self.model.config.context:
            return None
        logp = continuation_logp(self.model, before, words)
        yes, no = _log_sum(logp[: len(self._yes)]), _log_sum(logp[len(self._yes) :])
        return 1.0 / (1.0 + math.exp(min(700.0, no - yes)))

    def _asked(self, context: Mapping[str, Any], reply: str) -> str:
        if "messages" not in context:
            return f"{context['prompt']}{reply}\n{self.question}\n"
        said = [{"role": "assistant", "content": reply}, {"role": "user", "content": self.question}]
        return self.tokenizer.render([*context["messages"], *said])


def _log_sum(logp: Sequence[float]) -> float:
    most = max(logp)
    return most + math.log(math.fsum(math.exp(one - most) for one in logp))
