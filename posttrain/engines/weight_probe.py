"""Weight probe: verifies that an engine samples with the synced weights, on a few tokens that the learner also scores.

The engine samples one token behind each prefix of a fixed text. Its log-probability of that token is compared with the
learner's, which is computed once per version for all tokens. A weight sync that does not change the weights in use is
detected in two ways: the difference exceeds a limit, or the engine agrees with the previous weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.core.seeds import seed_of
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.models.row_shards import asked_by_all

TOKENS = 32
LIMIT = 0.05  # nats, in float32: kernels differ by some 1e-5
LIMIT_BFLOAT16 = 0.5  # nats, for weights rounded to 8 bits; observed: up to 0.1
OLD = 10.0  # if the difference to the new weights is this many times that to the old ones, the old ones are in use
NOTICED = 1e-4  # nats: smaller differences are noise


class WeightProbe:
    """Weight probe of one model. `limit`: maximal difference between engine and learner at any token, in nats."""

    def __init__(self, model: Model, limit: float) -> None:
        self.limit = limit
        vocab, count = model.config.vocab, min(TOKENS, model.config.context - 1)
        self.text = tuple(7919 * (place + 1) % vocab for place in range(count))
        self._table: Tensor | None = None  # float32 [n, V]: row i behind text[: i + 1], of the version being synced
        self._before: Tensor | None = None  # the same of the previous version

    def look(self, weights: Model) -> None:
        """Compute the learner's log-probabilities from the weights, of which no reference is kept.

        Raises UserError if they are not finite, or another process that holds some of the weights is lost.
        """
        device, count = weights.head.device, len(self.text)
        place = torch.arange(count, device=device)
        layout = Layout(torch.tensor(self.text, device=device), place, (0,), (count,), (-1,))
        with asked_by_all(weights), torch.no_grad():
            hidden = weights.hidden(layout, place)  # a sharded head exists only after this call
            logits = weights.head.logits(hidden)
        if not logits.isfinite().all():
            raise UserError(
                "the model's probabilities are not finite: its weights are damaged, or training made them too large: try a "
                "smaller --lr, or --max-grad-norm"
            )
        self._before, self._table = self._table, logits.float().log_softmax(-1).cpu()

    def requests(self) -> list[tuple[list[int], Sampling]]:
        """Return the requests to the engine, one (prompt, sampling) for each prefix of the text."""
        return [
            (list(self.text[: place + 1]), Sampling(max_tokens=1, seed=seed_of("canary", place)))
            for place in range(len(self.text))
        ]

    def deviation(self, found: Mapping[int, Completion], had_previous: bool = False) -> tuple[float, str | None]:
        """Return (maximal difference between engine and learner in nats, the problem or None). `had_previous`: whether
        the engine had the previous version.
        """
        assert self._table is not None and len(found) == len(self.text)
        far = self._far(self._table, found)
        if not far <= self.limit:
            return far, f"is {far:.3g} nats off the learner's log-probabilities, above the limit of {self.limit:g}"
        if had_previous and self._before is not None:
            old = self._far(self._before, found)
            if far > max(NOTICED, OLD * old):
                return far, f"still samples with the old weights ({old:.1g} nats off those, {far:.3g} off the new)"
        return far, None

    def _far(self, table: Tensor, found: Mapping[int, Completion]) -> float:
        token = torch.tensor([found[place].tokens[0] for place in range(len(found))])
        logp = torch.tensor([found[place].logp[0] for place in range(len(found))])
        return (table.gather(-1, token[:, None]).squeeze(-1) - logp).abs().max().item()
