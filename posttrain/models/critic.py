"""Critics: a value for each state (PPO), or twin values for each action over the vocabulary (soft actor-critic), with
one for each state beside them in its first form.

The backbone is a separate decoder or the policy's, whose hidden states are then shared. Heads are initialised near
zero, so that the first values are uninformative instead of wrong.

T    tokens of a micro-batch    N    scored tokens    D    hidden size    V    vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from posttrain.core.batch import Packed
from posttrain.core.component import Need
from posttrain.core.protocols import TRAINING, Model
from posttrain.core.types import UserError
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import load_backbone
from posttrain.models.critic_file import STORED, critic_file
from posttrain.models.losses.likelihood import Hidden, Temperature, soft_values
from posttrain.models.native.head import Head
from posttrain.models.row_shards import here
from posttrain.models.tensor_files import open_tensors
from posttrain.models.weight_files import check_finite

NEAR_ZERO = 1e-3  # standard deviation of a new head's weights, times 1 / sqrt(D)


class ValueModel(nn.Module):
    """Value V of the state in which each scored token is chosen."""

    reads_policy = False  # whether a critic with a backbone of its own uses the policy's hidden states and head

    def __init__(self, hidden: int, backbone: Backbone | None, seed: int) -> None:
        super().__init__()
        self.backbone = backbone  # None: the policy's hidden states are used
        self.weight = nn.Parameter(_near_zero((hidden,), hidden, seed))
        self.bias = nn.Parameter(torch.zeros(()))

    def follow(self, share: float) -> None:
        """Do nothing: there are no target copies."""

    def forward(self, batch: Packed, policy: Hidden, temperature: Temperature) -> dict[str, Tensor]:
        """Return {"value": float32 [N]}. `policy`: the policy's hidden states at the scored tokens, and its head."""
        return {
            "value": self.of(policy.states if self.backbone is None else self.backbone.hidden(batch.layout, batch.at))
        }

    def of(self, states: Tensor) -> Tensor:
        """Return the value of hidden states [N, D], float32 [N]."""
        with torch.autocast(states.device.type, enabled=False):  # advantages are small differences of values
            wide = torch.promote_types(states.dtype, torch.float32)
            return states.to(wide) @ self.weight.to(wide) + self.bias


class TwinValues(nn.Module):
    """Twin soft action values over the vocabulary: two heads of one backbone."""

    reads_policy = True

    def __init__(self, backbone: Backbone, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        config = backbone.config
        self.heads = nn.Parameter(_near_zero((2, config.vocab, config.hidden), config.hidden, seed))

    def twins(self, own: Tensor) -> tuple[Hidden, Hidden]:
        """Return both action values over the vocabulary, without a gradient, from hidden states [N, D]."""
        one, two = (Hidden(own.detach(), Head(weight.detach())) for weight in self.heads)
        return one, two

    def taken(self, own: Tensor, target: Tensor) -> Tensor:
        """Return the action values of these tokens, float32 [2, N]."""
        with torch.autocast(own.device.type, enabled=False):
            wide = torch.promote_types(own.dtype, torch.float32)
            return (own.to(wide) * self.heads[:, target].to(wide)).sum(-1)


class ActionValueModel(TwinValues):
    """Twin soft action values with target copies that follow slowly (arXiv 1812.05905, section 4.2)."""

    def __init__(self, backbone: Backbone, seed: int) -> None:
        super().__init__(backbone, seed)
        self.slow_backbone = copy.deepcopy(backbone).requires_grad_(False)
        self.slow_heads = nn.Parameter(self.heads.detach().clone(), requires_grad=False)

    def forward(self, batch: Packed, policy: Hidden, temperature: Temperature) -> dict[str, Tensor]:
        """Return {"q": of the target tokens, float32 [2, N]; "expected_q", "target_q": [N], see `soft_values`}."""
        own = self.backbone.hidden(batch.layout, batch.at)
        with torch.no_grad():
            slow = self.slow_backbone.hidden(batch.layout, batch.at)
        slow_one, slow_two = (Hidden(slow, Head(weight)) for weight in self.slow_heads)
        expected, target = soft_values(policy, self.twins(own), (slow_one, slow_two), temperature)
        return {"q": self.taken(own, batch.target), "expected_q": expected, "target_q": target}

    def follow(self, share: float) -> None:
        """Move the target copies towards the critic by `share` of the difference."""
        pairs = zip(self.slow_backbone.parameters(), self.backbone.parameters(), strict=True)
        _follow([*pairs, (self.slow_heads, self.heads)], share)


class SoftStateValueModel(TwinValues):
    """Twin soft action values beside a network of soft state values, which alone has a target copy (arXiv 1801.01290,
    section 4.2).
    """

    def __init__(self, backbone: Backbone, seed: int) -> None:
        super().__init__(backbone, seed)
        self.state = ValueModel(backbone.config.hidden, copy.deepcopy(backbone), seed)
        self.slow_state = copy.deepcopy(self.state).requires_grad_(False)

    def forward(self, batch: Packed, policy: Hidden, temperature: float) -> dict[str, Tensor]:
        """Return {"q": of the target tokens, float32 [2, N]; "expected_q": [N], see `soft_values`; "value",
        "target_value": of the states, float32 [N], the second by the target copy}.
        """
        own = self.backbone.hidden(batch.layout, batch.at)
        (expected,) = soft_values(policy, self.twins(own), None, temperature)
        value = self.state(batch, policy, temperature)["value"]
        with torch.no_grad():
            target = self.slow_state(batch, policy, temperature)["value"]
        return {"q": self.taken(own, batch.target), "expected_q": expected, "value": value, "target_value": target}

    def follow(self, share: float) -> None:
        """Move the target copy towards the network of state values by `share` of the difference."""
        _follow(zip(self.slow_state.parameters(), self.state.parameters(), strict=True), share)


def _follow(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]], share: float) -> None:
    """Move each first parameter towards the second by `share` of the difference."""
    with torch.no_grad():
        for slow, own in pairs:
            here(slow).lerp_(here(own), share)


Critic = ValueModel | ActionValueModel | SoftStateValueModel


def critic_kind(needs: Collection[Need]) -> type[Critic]:
    """Return the kind of critic that an algorithm with these needs has."""
    if Need.SOFT_STATE_VALUE in needs:
        return SoftStateValueModel
    return ActionValueModel if Need.ACTION_VALUE in needs else ValueModel


def new_critic(
    kind: type[Critic],
    folder: Path | None,
    policy: Model,
    seed: int,
    device: torch.device | None = None,
    matrices: torch.dtype | None = None,
) -> Critic:
    """Create a critic with a backbone from a checkpoint folder; None: the policy's backbone. `device`: by default the
    policy's. `matrices`: see `load_backbone`.

    The score head of a reward model and the critic of a run's checkpoint are loaded; any other head is initialised near
    zero. Raises UserError if the folder's model does not fit.
    """
    device, hidden = device or policy.head.device, policy.config.hidden
    if folder is None:
        assert kind is ValueModel
        return ValueModel(hidden, None, seed).to(device)
    backbone, score = load_backbone(folder, device, matrices)
    if backbone.config.vocab < policy.config.vocab:
        raise UserError(
            f"the critic in {folder} has {backbone.config.vocab} tokens and the policy {policy.config.vocab}: give a critic "
            "with the policy's tokenizer"
        )
    critic: Critic
    if kind is ValueModel:
        critic = ValueModel(backbone.config.hidden, backbone, seed)
    else:
        assert issubclass(kind, TwinValues)
        critic = kind(backbone, seed)
    stored = folder / TRAINING / STORED
    if stored.exists():
        left, own = _read_stored(stored), dict(critic.named_parameters())
        if left.keys() == own.keys():
            if any(left[name].shape != own[name].shape for name in own):
                raise UserError(
                    f"the critic in {stored} has another size than the policy beside it: start from the critic's base "
                    "model, with --critic-model"
                )
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(left[name])
    elif score is not None and isinstance(critic, ValueModel):
        with torch.no_grad():
            critic.weight.copy_(score)
    return critic.to(device)


def stored_critic(folder: Path, policy: Model) -> ValueModel:
    """Return the critic of a run's checkpoint, for the policy beside it.

    Raises UserError if there is none, if it has values of actions alone, or another model than the policy's.
    """
    file = critic_file(folder)
    left = _read_stored(file)
    if "heads" in left:
        raise UserError(
            f"the critic in {file} values actions, not states: give a run of ppo, or another with a value V"
        )
    own = any(name.startswith("backbone.") for name in left)
    backbone, device = load_backbone(folder, policy.head.device)[0] if own else None, policy.head.device
    critic = ValueModel(policy.config.hidden, backbone, 0).to(device).requires_grad_(False)
    places = dict(critic.named_parameters())
    if left.keys() != places.keys() or any(left[name].shape != place.shape for name, place in places.items()):
        raise UserError(
            f"the critic in {file} is another model than the policy beside it: only one like it can be read"
        )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(left[name])
    return critic


def _read_stored(file: Path) -> dict[str, Tensor]:
    with open_tensors(file) as stored:
        left = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  it is not a dict
    for name, tensor in left.items():
        check_finite(file, name, tensor)
    return left


def _near_zero(shape: tuple[int, ...], hidden: int, seed: int) -> Tensor:
    if torch.get_default_device().type == "meta":  # a model of shapes alone
        return torch.empty(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (NEAR_ZERO / hidden**0.5)
