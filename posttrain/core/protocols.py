"""The protocols between the rooms: learners, engines, sources, objectives, services. Higher rooms depend on these
alone.

The type checker proves each implementation against its protocol, at the end of the implementation's module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from posttrain.core.batch import Batch, Layout, Outputs, Packed, Stats, TrainingStep
from posttrain.core.transcripts import Media
from posttrain.core.types import Completion, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from posttrain.models.backbone import Backbone
    from posttrain.models.native.head import Head

TRAINING = "training"
"""The folder of a checkpoint with the state that only training reads: that of a learner, and that of a source."""


class ModelShape(Protocol):
    """The fields of a model's own configuration that this package reads."""

    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...  # width of the hidden states
    @property
    def context(self) -> int: ...  # most tokens of one sequence


class Model(Protocol):
    """A language model that can be trained: a torch module with all that a learner needs."""

    eos_ids: tuple[int, ...]  # every token id that ends a reply

    @property
    def config(self) -> ModelShape: ...

    @property
    def head(self) -> Head:
        """The map of hidden states to logits."""
        ...

    @property
    def decoder(self) -> Backbone | None:
        """The model itself if it has the methods of a decoder (adapters, routers, pictures, weights for engines),
        otherwise None.
        """
        ...

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """Return the hidden states [n, hidden] that the head reads, at tokens `at`, int64 [n], of a micro-batch; may
        repeat.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint folder with config and weights, from which the same kind of model can be loaded."""
        ...

    # methods of every torch module
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def requires_grad_(self, requires_grad: bool = True) -> Self: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Measured(Protocol):
    """A model that computes statistics with its weights before they are written: see `RewardModel.measure`."""

    def measure(self) -> None: ...


class Objective(Protocol):
    """The loss of one micro-batch: a scalar, sum over n of weight[n] * loss[n]. Depends neither on masks nor on the
    world size.
    """

    @property
    def wants(self) -> frozenset[str]: ...  # fields of `Outputs` that it reads, besides logp
    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor: ...


@runtime_checkable
class Source(Protocol):
    """A source of steps. `produce(k)` is called with k = 1, 2, ...; `state()` returns everything that it has to
    remember.

    A state is JSON data, except for values that are still being computed: these have a method `plain`, which waits for
    them.
    """

    def produce(self, number: int) -> TrainingStep: ...
    # called after the updates of each step: completes it
    def learned(self, step: TrainingStep, stats: Stats) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Learner(Protocol):
    """Holds the weights, evaluates models and updates the policy."""

    version: int  # counts optimizer updates

    @property
    def device(self) -> torch.device: ...

    @property
    def moves_every_token(self) -> bool:
        """Whether an update has losses of its own over all tokens, independent of the objective's weights of these
        tokens.
        """
        ...

    def evaluate(
        self,
        batches: Sequence[Packed],
        of: str = "policy",
        want: frozenset[str] = frozenset(),
    ) -> list[Outputs]:
        """Return the outputs of the policy (or another held model, by its name) and the critic for each micro-batch.

        Gradients are not computed. "reference" is the frozen starting model; divergences are those of the policy from
        the models that `Packed.readings` name.
        """
        ...

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        """Make one optimizer update with the summed gradient of all micro-batches."""
        ...

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        """Return float64 [S]: squared norm of the gradient of each rollout's log-probability. Each batch holds one
        rollout.
        """
        ...

    def move(self, of: str, rate: float) -> None:
        """Move a frozen model by the share `rate` towards the current policy's weights; with 1 it becomes a copy of the
        policy.
        """
        ...

    def weights(self) -> Model:
        """Return the policy, from which an engine takes its weights."""
        ...

    def save(self, folder: Path | None) -> None:
        """Write the policy as a checkpoint into `folder`, and the state of training into `folder`/training.

        None: another process of the run writes them, and this one only sends the state that it alone holds.
        """
        ...

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote, except the policy's weights, with which the learner was created."""
        ...


class Engine(Protocol):
    """Samples replies. Requests are answered in any order; a completion's content does not depend on the order."""

    # whether the bits of a completion are independent of other requests and of time
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def backend(self) -> str: ...  # the implementation, in words

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Submit a request for a reply. `keep`: the next request of this id may begin with this prompt and its reply.

        Then only the new tokens of that request have to be computed. Where requests are `batch_invariant`, this does
        not change a bit of the reply, nor does freeing the kept state in the meantime.
        """
        ...

    def forget(self, id: int) -> None: ...  # frees the kept state: no further request continues this one
    def copy(self, id: int, to: int, tokens: int) -> None:
        """Allow the next request `to` to begin with the first `tokens` kept tokens of this one (its prompt and its
        reply).
        """
        ...

    def cancel(self, id: int) -> None: ...  # an unanswered request: it gets no completion
    def poll(self) -> list[Completion]: ...  # works for a few decoding steps; [] where no request finished in them
    def load(self, weights: Any, version: int) -> None: ...  # weight sync; for shared weights only the version changes
    def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """An engine with counters, such as a pool of engines."""

    def counts(self) -> dict[str, float]: ...


@runtime_checkable
class Paced(Protocol):
    """An engine that counts its work: see `posttrain.engines.throughput`."""

    def pace(self) -> Mapping[str, float]: ...  # counts since the beginning, by name


@runtime_checkable
class Watchable(Protocol):
    """An engine whose replies can be read while they are sampled."""

    def so_far(self, ids: Collection[int]) -> dict[int, tuple[list[int], list[float]]]:
        """Return request in a slot -> tokens of its reply, and their log-probabilities."""
        ...


@runtime_checkable
class Resting(Protocol):
    """An engine that can free memory between the phases of a step."""

    def rest(self) -> None: ...  # until the next weights, or the next request


@runtime_checkable
class VisionEngine(Protocol):
    """An engine whose prompts may contain pictures."""

    def submit_with_media(
        self, id: int, prompt: Sequence[int], media: Sequence[Media], sampling: Sampling, keep: bool = False
    ) -> None:
        """Submit as `Engine.submit` does. `media`: the pictures in the prompt."""
        ...


@runtime_checkable
class ReadingEngine(Protocol):
    """An engine that judges its samples with a reward model, and so also gets the prompt in the form that the model
    reads.
    """

    def submit_read(
        self, id: int, prompt: Sequence[int], context: Mapping[str, Any], sampling: Sampling, keep: bool = False
    ) -> None:
        """Submit as `Engine.submit` does. `context`: the same prompt as {"prompt": text} or {"messages": [...]}."""
        ...


class Service(Protocol):
    """Answers questions of environments in the main process, many at once.

    An answer is plain JSON data, or Invalid where there is none; Reasoned is either of these with the reasons. An
    answer depends only on the content of its question: neither on the order of the questions nor on other questions.
    Neither `submit` nor `poll` waits for an answer.
    """

    @property
    def identity(self) -> str: ...  # all further dependencies of the answers: with another identity they may differ

    @property
    def description(self) -> str: ...  # the service in words

    def submit(self, id: int, content: Any) -> None: ...  # plain JSON data, as the environment gave it
    def poll(self) -> list[tuple[int, Any]]: ...  # (id, answer) of finished questions; may compute some of them
    def example(self, content: Any) -> Any: ...  # a possible answer to this question, for rehearsals: asks nobody
    def counts(self) -> dict[str, float]: ...  # since the beginning: requests, tokens, cost, failures ...
    def close(self) -> None: ...


class World(Protocol):
    """The processes that share a run. All processes make the same calls in the same order.

    A call raises UserError where another process has failed, or does not answer for too long.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor: ...  # over all processes; x itself is not changed
    def gather(self, x: Any) -> list[Any]: ...  # the values of all processes, by rank
    def apart(self) -> World: ...  # the same processes, for another thread: its calls have their own order
    def fail(self, error: BaseException) -> None: ...  # informs the others that this process makes no more calls


@runtime_checkable
class Lasting(Protocol):
    """A world whose launcher may restart all of its processes, and keeps marks for the restarted ones."""

    def mark(self, name: str) -> None: ...
    def marked(self, name: str) -> bool: ...


class Alone:
    """The world of a single process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Any) -> list[Any]:
        return [x]

    def apart(self) -> Alone:
        return self

    def fail(self, error: BaseException) -> None:
        pass


if TYPE_CHECKING:
    _proof: Callable[..., World] = Alone
