"""The protocols between the rooms: learners, engines, sources, objectives, services. Everything above knows these alone.

The type checker proves each implementation against its protocol, at the end of its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from posttrain.core.batch import Batch, Layout, Outputs, Packed, Stats, TrainingStep
from posttrain.core.types import Completion, Media, Sampling

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from posttrain.models.backbone import Backbone
    from posttrain.models.native.head import Head

TRAINING = "training"
"""The folder of a checkpoint that holds what only training reads: a learner's state, and a source's."""


class ModelShape(Protocol):
    """The fields of a model's own configuration that are read here."""

    @property
    def vocab(self) -> int: ...
    @property
    def hidden(self) -> int: ...  # width of the hidden states
    @property
    def context(self) -> int: ...  # most tokens of one sequence


class Model(Protocol):
    """A language model that can be trained: all that a learner needs. It is a torch module."""

    eos_ids: tuple[int, ...]  # every token id that ends a reply

    @property
    def config(self) -> ModelShape: ...

    @property
    def head(self) -> Head:
        """The map of hidden states to logits."""
        ...

    @property
    def decoder(self) -> Backbone | None:
        """Itself, if more can be asked of it: adapters, routers, pictures, its weights as engines take them."""
        ...

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """Hidden states [n, hidden] that the head reads, at some tokens of a micro-batch: at int64 [n], may repeat."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint folder from which the same kind of model is loaded again: config and weights."""
        ...

    # methods of every torch module
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def requires_grad_(self, requires_grad: bool = True) -> Self: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Measured(Protocol):
    """A model that finds something out of its weights before they are written: see `RewardModel.measure`."""

    def measure(self) -> None: ...


class Objective(Protocol):
    """The loss of one micro-batch: a scalar, sum over n of weight[n] * loss[n]. Knows neither masks nor the world size."""

    @property
    def wants(self) -> frozenset[str]: ...  # fields of `Outputs` that it reads, besides logp
    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor: ...


@runtime_checkable
class Source(Protocol):
    """A source of steps. `produce(k)` is called with k = 1, 2, ...; all it remembers is in `state()`.

    A state is JSON data, but for values that are still being made: these have a method `plain`, which waits for them.
    """

    def produce(self, number: int) -> TrainingStep: ...
    def learned(
        self, step: TrainingStep, stats: Stats
    ) -> None: ...  # called after the updates of each step: completes it
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Learner(Protocol):
    """Holds the weights, scores and improves them."""

    version: int  # counts optimizer updates

    @property
    def device(self) -> torch.device: ...

    @property
    def moves_every_token(self) -> bool:
        """Whether an update has losses of its own over all tokens that it is given, whatever the objective weighs them."""
        ...

    def evaluate(
        self,
        batches: Sequence[Packed],
        of: str = "policy",
        want: frozenset[str] = frozenset(),
    ) -> list[Outputs]:
        """Return the outputs of the policy (or another held model, by its name) and the critic for each micro-batch.

        Without a gradient. The frozen starting model is "reference"; divergences are those of the policy from the models
        that `Packed.readings` name.
        """
        ...

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        """One optimizer update with the summed gradient of all micro-batches."""
        ...

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        """float64 [S]: squared norm of the gradient of each rollout's log-probability; each batch holds one rollout."""
        ...

    def move(self, of: str, rate: float) -> None:
        """Move a frozen model this share of the way to the current policy's weights; 1 makes it the policy."""
        ...

    def weights(self) -> Model:
        """Return the policy, for an engine to take over."""
        ...

    def save(self, folder: Path | None) -> None:
        """Write all that is held: the policy as a checkpoint into `folder`, the state of training into `folder`/training.

        None: another process of the run does; this one gives what it alone holds.
        """
        ...

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, but for the policy's weights, with which the learner was made."""
        ...


class Engine(Protocol):
    """Samples. Requests are answered in no particular order; a completion's content does not depend on the order."""

    @property
    def batch_invariant(
        self,
    ) -> bool: ...  # whether no bit of a completion depends on other requests, or the time
    @property
    def backend(self) -> str: ...  # the implementation, in words

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Ask for a reply. `keep`: the next request of this id may begin with these tokens and the reply.

        Only its new tokens are then computed. Whether they are, and whether kept state was freed meanwhile, changes no
        bit of the reply where requests are `batch_invariant`.
        """
        ...

    def forget(self, id: int) -> None: ...  # no other request goes on from this one
    def copy(self, id: int, to: int, tokens: int) -> None:
        """The next request `to` may begin with the first so many kept tokens of this one, and its reply."""
        ...

    def cancel(self, id: int) -> None: ...  # a request that is not answered yet: there will be no completion
    def poll(self) -> list[Completion]: ...  # works for a few decoding steps; [] where nothing has finished in them
    def load(self, weights: Any, version: int) -> None: ...  # weight sync; for shared weights only the version changes
    def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """An engine that counts what becomes of its parts."""

    def counts(self) -> dict[str, float]: ...


@runtime_checkable
class Paced(Protocol):
    """An engine that counts what its work takes: see `posttrain.engines.throughput`."""

    def pace(self) -> Mapping[str, float]: ...  # counts since the beginning, by name


@runtime_checkable
class Seeing(Protocol):
    """An engine whose prompts may hold pictures."""

    def submit_seen(
        self, id: int, prompt: Sequence[int], media: Sequence[Media], sampling: Sampling, keep: bool = False
    ) -> None:
        """Submit as `Engine.submit` does. `media`: the pictures in the prompt."""
        ...


@runtime_checkable
class ReadingEngine(Protocol):
    """An engine that judges what it samples, and reads the prompt for that as a reward model does."""

    def submit_read(
        self, id: int, prompt: Sequence[int], context: Mapping[str, Any], sampling: Sampling, keep: bool = False
    ) -> None:
        """Submit as `Engine.submit` does. `context`: {"prompt": text} or {"messages": [...]}, of the same prompt."""
        ...


class Service(Protocol):
    """Answers questions of environments in the main process, many at once.

    An answer is plain JSON data, or Invalid where there is none; Reasoned is either of them with its reasons. It
    follows from the content of its question: not from the order of the questions, nor from other questions. Neither
    `submit` nor `poll` waits for an answer.
    """

    @property
    def identity(self) -> str: ...  # all else that the answers depend on: another identity may answer otherwise

    @property
    def description(self) -> str: ...  # the service in words

    def submit(self, id: int, content: Any) -> None: ...  # plain JSON data, as the environment gave it
    def poll(self) -> list[tuple[int, Any]]: ...  # (id, answer) of finished questions; may compute some of them
    def example(self, content: Any) -> Any: ...  # an answer as it may come to this, for rehearsals: nothing is asked
    def counts(self) -> dict[str, float]: ...  # since the beginning: requests, tokens, cost, failures ...
    def close(self) -> None: ...


class World(Protocol):
    """The processes that share a run. Every one of them makes the same calls in the same order.

    A call raises UserError where another process has failed, or is silent for too long.
    """

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor: ...  # over all processes; x itself is not changed
    def gather(self, x: Any) -> list[Any]: ...  # one from each process, by rank
    def apart(self) -> World: ...  # the same processes, for another thread: its calls have an order of their own
    def fail(self, error: BaseException) -> None: ...  # let the others know that this process makes no more calls


@runtime_checkable
class Lasting(Protocol):
    """A world whose launcher may start all of its processes again, and keeps earlier marks for them."""

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
