"""Critics: how they begin, where they come from, what they say, and that what they learn stays theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from heads import unread
from rl_sources import digits
from safetensors.torch import load_file
from torch import Tensor, nn
from update_cases import (
    SUCCESS,
    WORDS,
    Case,
    board,
    chosen_row,
    collector_of,
    credit,
    feed,
    gradient,
    new_case,
    new_learner,
    new_player,
)

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.critic_loss import Value
from posttrain.algorithms.policy import PolicyObjective
from posttrain.config.training import RL
from posttrain.core.batch import Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, StopReason, Task, UserError
from posttrain.envs.demonstration import demonstrate
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ActionValueModel, SoftStateValueModel, ValueModel, new_critic
from posttrain.models.losses.likelihood import Hidden, soft_values
from posttrain.models.native.decoder import causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.head import Head
from posttrain.models.reward_model import ScoreShape, new_reward_model
from posttrain.training.loop import train
from posttrain.training.sources.collector import Size
from posttrain.training.sources.packing import pack
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.training_run import run_training

VALUE, Q = frozenset({"value"}), frozenset({"q", "entropy"})


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


TASKS = [{"id": str(i), "prompt": f"{i}+1="} for i in range(6)]


def of_the_prompt(task: Task, reply: str) -> float:
    """What the prompt alone decides, and a critic can know."""
    return int(task["id"]) % 3 / 2


def new_source(name: str, critic: Any = None, env: Any = digits, **settings: Any) -> RLSource:
    row = chosen_row(find(name), **{"max_tokens": 8, **settings})
    learner = new_learner(row, torch.float32)
    if critic is not None:
        learner = LocalLearner(learner.model, Optimization(lr=1e-2), critic=critic, others=learner.others)
    texts = [[demonstrate({"id": t["id"], "prompt": t["prompt"], "response": t["id"]}, WORDS, [0])] for t in TASKS]
    collector = collector_of(TASKS, new_player(env, learner.model, 8), row, Size(3, 4, 200), success=SUCCESS)
    return RLSource(collector, learner, row, texts=texts)


def run(source: RLSource, steps: int) -> list[dict[str, float]]:
    seen: list[dict[str, float]] = []
    objective = PolicyObjective(source.algorithm)
    train(source.learner, source, objective, [lambda t: seen.append(t.stats.means())], first=1, steps=steps)
    return seen


# -- where they come from ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a policy."""
    folder = tmp_path_factory.mktemp("start")
    save_model(tiny(WORDS), folder, WORDS)
    return folder


def observed(tokens: list[int]) -> Any:
    """A batch whose one scored token is predicted by the last of these."""
    transcript = Transcript()
    transcript.observe(tokens)
    transcript.sample(Completion(0, [5], [-1.0], "", StopReason.EOS, 0))
    return pack([[transcript]], [0])


def test_first_values_are_near_0_from_either_backbone(start: Path) -> None:
    policy = load_model(start)
    for folder in (start, None):
        critic = new_critic(ValueModel, folder, policy, seed=3)
        assert isinstance(critic, ValueModel) and (critic.backbone is None) is (folder is None)
        learner = LocalLearner(policy, Optimization(), critic=critic)
        (found,) = learner.evaluate([observed([7, 8, 9])], want=VALUE)
        assert found.value is not None and 0 < found.value.abs().max() < 0.01
    twins = new_critic(ActionValueModel, start, policy, seed=3)
    assert isinstance(twins, ActionValueModel) and not torch.equal(twins.heads[0], twins.heads[1])
    (found,) = LocalLearner(policy, Optimization(), critic=twins).evaluate([observed([7, 8, 9])], want=Q)
    assert found.q is not None and 0 < found.q.abs().max() < 0.01
    assert torch.equal(flat(twins.backbone), flat(twins.slow_backbone)) and torch.equal(twins.heads, twins.slow_heads)


def test_seed_decides_a_new_head(start: Path) -> None:
    policy = load_model(start)
    one, same, other = (new_critic(ValueModel, start, policy, seed) for seed in (3, 3, 4))
    assert torch.equal(flat(one), flat(same)) and not torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_reward_model_written_by_transformers_gives_its_score_as_value(kind: str, start: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=WORDS.vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    scorer = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    scorer.save_pretrained(tmp_path)
    critic = new_critic(ValueModel, tmp_path, load_model(start), seed=3)
    tokens = [7, 8, 9, 30, 12]
    with torch.no_grad():
        expected = scorer(torch.tensor([tokens])).logits.item()
        batch = observed(tokens)
        found = critic(batch, unread(), 1.0)["value"]
    assert found.item() == pytest.approx(expected, abs=1e-5) and abs(expected) > 1e-3


@pytest.mark.parametrize(("pooling", "head"), [("mean", "linear"), ("last", "mlp"), ("last", "linear")])
def test_reward_model_of_ours_gives_its_backbone_and_a_linear_head(
    start: Path, tmp_path: Path, pooling: Any, head: Any
) -> None:
    scorer = new_reward_model(start, ScoreShape(pooling, head), seed=5)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.1)
    scorer.save(tmp_path)
    critic = new_critic(ValueModel, tmp_path, load_model(start), seed=3)
    assert critic.backbone is not None
    assert torch.equal(flat(critic.backbone), flat(scorer.backbone))
    assert isinstance(critic, ValueModel) and torch.equal(critic.weight, scorer.score[0]) == (head == "linear")


def test_critic_of_a_run_is_taken_over_with_head_and_backbone(start: Path, tmp_path: Path) -> None:
    learned = new_critic(ValueModel, start, load_model(start), seed=3)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.1)
    LocalLearner(tiny(WORDS, seed=5), Optimization(), critic=learned).save(tmp_path)
    again = new_critic(ValueModel, tmp_path, load_model(start), seed=4)
    assert torch.equal(flat(learned), flat(again))


def test_critic_of_a_run_that_is_of_another_size_than_its_policy_is_refused(start: Path, tmp_path: Path) -> None:
    policy = load_model(start)
    small = DecoderConfig(
        vocab=policy.config.vocab, hidden=8, layers=2, heads=2, kv_heads=1, head_size=4, intermediate=8, context=64,
        tied=True,
    )  # fmt: skip
    other = ValueModel(8, new_decoder(small, 0), 3)
    LocalLearner(policy, Optimization(), critic=other).save(tmp_path)
    with pytest.raises(UserError, match="has another size than the policy beside it.*--critic-model"):
        new_critic(ValueModel, tmp_path, policy, seed=4)


def test_critic_with_fewer_tokens_than_the_policy_is_refused(start: Path, tmp_path: Path) -> None:
    small = DecoderConfig(
        vocab=9, hidden=8, layers=1, heads=2, kv_heads=1, head_size=4, intermediate=8, context=64, tied=True
    )  # fmt: skip
    save_model(new_decoder(small, 0), tmp_path)
    with pytest.raises(UserError, match="has 9 tokens and the policy .*: give a critic with the policy's tokenizer"):
        new_critic(ValueModel, tmp_path, load_model(start), seed=3)


def test_run_takes_its_critic_from_another_run(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({**t, "answer": "1"}) + "\n" for t in TASKS)
    Path("rows.jsonl").write_text(rows)
    Path("env.py").write_text("def reward(task, reply):\n    return float('1' in reply)\n")
    common: dict[str, Any] = {
        "model": str(start), "tasks": "rows.jsonl", "env": "env.py:reward", "algorithm": "open-reasoner-zero",
        "steps": 1, "prompts": 2, "group": 2, "max_tokens": 4, "critic_lr": 1e-2, "env_workers": 0, "quiet": True,
        "threads": 1,
    }  # fmt: skip
    run_training(RL(out="first", **common))
    second = run_training(RL(out="second", critic_model="first", **{**common, "critic_lr": 1e-12}))
    first, later = (
        load_file(next(Path(folder).glob("checkpoints/*/training/critic.safetensors")))
        for folder in ("first", "second")
    )
    assert all(torch.allclose(first[name], later[name], atol=1e-9) for name in first)
    assert (first["weight"].abs() > 5e-3).any() and second.checkpoint is not None


# -- what they say -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_value_is_that_of_the_state_in_which_a_token_is_chosen(shared: bool) -> None:
    model = tiny(WORDS, dtype=torch.float64)
    critic = ValueModel(32, None if shared else tiny(WORDS, seed=2), 3).double()
    with torch.no_grad():
        critic.weight.mul_(500)
        critic.bias.fill_(0.25)
    case = new_case(chosen_row(find("ppo")), groups=2, size=2)
    learner = LocalLearner(model, Optimization(), critic=critic)
    (found,) = learner.evaluate([pack([r.transcripts for r in case.rollouts], range(4))], want=VALUE)
    backbone, expected = critic.backbone or model, []
    for rollout in case.rollouts:
        (transcript,) = rollout.transcripts
        tokens = torch.tensor(transcript.tokens)
        with torch.no_grad():
            values = backbone(tokens, torch.arange(len(tokens)), causal) @ critic.weight + 0.25
        expected += [values[t - 1] for t in transcript.scored.tolist()]
    assert found.value is not None and (found.value - torch.stack(expected)).abs().max() < 1e-10


def test_shared_backbone_learns_from_both_losses_and_a_separate_one_from_the_value_loss_alone() -> None:
    row = chosen_row(find("ppo"), critic="shared")
    separate = new_case(row, groups=2, size=2)
    shared_critic = ValueModel(32, None, 3).double()
    with torch.no_grad():
        shared_critic.weight.copy_(separate.learner.critic.weight)  # type: ignore[union-attr,arg-type]
    learner = LocalLearner(separate.learner.model, Optimization(), critic=shared_critic)
    shared = Case(row, learner, separate.rollouts, [], separate.old, separate.reference, separate.value)
    policy = sum(p.numel() for p in learner.model.parameters())
    gradients = [
        gradient(c, feed(c, c.rollouts, credit(row, board(c, c.rollouts)), [range(4)]))[1][:policy]
        for c in (separate, shared)
    ]
    assert not torch.allclose(gradients[0], gradients[1])
    alone = credit(row, board(separate, separate.rollouts))
    (batch,) = feed(separate, separate.rollouts, alone, [range(4)])
    outputs = separate.learner._outputs(separate.learner.model, batch, row.wants)
    assert row.critic is not None
    loss = (batch.weight * row.critic(outputs, batch, Stats())).sum()
    touched = torch.autograd.grad(loss, list(separate.learner.model.parameters()), allow_unused=True)
    assert all(g is None for g in touched)


def test_explained_variance_is_1_minus_what_is_left_over_the_variance_of_the_returns() -> None:
    source = new_source("open-reasoner-zero")
    step = source.produce(1)
    rollouts = [r for r in step.played]
    values = [source.learner.evaluate([pack([r.transcripts], [0])], want=VALUE)[0].value for r in rollouts]
    v = torch.cat([x for x in values if x is not None]).double()
    returns = torch.cat([torch.full((r.n_sampled,), float(r.reward), dtype=torch.float64) for r in rollouts])  # type: ignore[arg-type]
    expected = 1 - (returns - v).var(correction=0) / returns.var(correction=0)
    figures = step.stats.means()
    assert figures["explained_variance"] == pytest.approx(expected.item(), abs=1e-5)
    assert figures["value"] == pytest.approx(v.mean().item(), abs=1e-5)
    assert figures["return"] == pytest.approx(returns.mean().item())


def test_critic_learns_to_explain_returns_that_the_prompt_decides() -> None:
    critic = ValueModel(32, tiny(WORDS, seed=2), 3)
    settings = {"critic_warmup": 20, "value_clip": 0.0, "value_coefficient": 1.0, "steps": 30}
    source = new_source("open-reasoner-zero", critic, of_the_prompt, **settings)
    before = flat(source.learner.model)
    seen = [s["explained_variance"] for s in run(source, 20)]
    assert seen[0] < 0.1 and sum(seen[-5:]) / 5 > 0.6, seen
    assert torch.equal(before, flat(source.learner.model))


# -- what stays whose --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "ppo-ptx", "vapo", "sac"])
def test_policy_stands_still_bit_for_bit_while_its_critic_warms_up(name: str) -> None:
    source = new_source(name, critic_warmup=2)
    policy, critic = flat(source.learner.model), flat(source.learner.critic)  # type: ignore[arg-type]
    run(source, 2)
    assert torch.equal(policy, flat(source.learner.model))
    assert not torch.equal(critic, flat(source.learner.critic))  # type: ignore[arg-type]
    train(source.learner, source, PolicyObjective(source.algorithm), [], first=3, steps=3)
    assert not torch.equal(policy, flat(source.learner.model))


def test_soft_values_have_a_gradient_into_the_policy_alone_and_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(0)

    def hidden() -> Hidden:
        states, head = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (3, 6))
        return Hidden(states.requires_grad_(), Head(head.requires_grad_()))

    policy, one, two, slow_one, slow_two = (hidden() for _ in range(5))
    expected, target = soft_values(policy, (one, two), (slow_one, slow_two), temperature=0.7)
    for n in range(3):
        pi = (policy.states[n] @ policy.head.weight.T / 0.7).softmax(-1).tolist()
        for (a, b), found in (((one, two), expected), ((slow_one, slow_two), target)):
            x, y = ((h.states[n] @ h.head.weight.T).tolist() for h in (a, b))
            assert found[n].item() == pytest.approx(sum(p * min(u, w) for p, u, w in zip(pi, x, y, strict=True)))
    others = [t for h in (one, two, slow_one, slow_two) for t in (h.states, h.head.weight)]
    gradients = torch.autograd.grad(
        expected.sum() + target.sum(), [policy.states, policy.head.weight, *others], allow_unused=True
    )
    assert all(g is not None for g in gradients[:2]) and all(g is None for g in gradients[2:])
    target_only = torch.autograd.grad(soft_values(policy, (one, two), (one, two))[0].sum(), policy.states)[0]
    assert target_only.any()


def test_soft_values_of_a_learner_are_expectations_under_the_policy_at_its_temperature() -> None:
    case = new_case(chosen_row(find("sac")), groups=1, size=2)
    case.learner.temperature = 0.6
    found = case.learner.evaluate([pack([r.transcripts for r in case.rollouts], range(2))], want=case.row.wants)[0]
    model, critic = case.learner.model, case.learner.critic
    assert isinstance(critic, ActionValueModel)
    assert found.expected_q is not None and found.target_q is not None and found.entropy is not None
    n = 0
    for rollout in case.rollouts:
        (transcript,) = rollout.transcripts
        tokens, place = torch.tensor(transcript.tokens), torch.arange(len(transcript))
        with torch.no_grad():
            logs = (model(tokens, place, causal) @ model.head.weight.T / 0.6).log_softmax(-1)
            own = critic.backbone(tokens, place, causal) @ critic.heads.transpose(1, 2)
            slow = critic.slow_backbone(tokens, place, causal) @ critic.slow_heads.transpose(1, 2)
        for t in transcript.scored.tolist():
            pi = logs[t - 1].exp()
            for value, of in ((found.expected_q, own), (found.target_q, slow)):
                assert value[n].item() == pytest.approx((pi * of[:, t - 1].amin(0)).sum().item(), rel=1e-9)
            assert found.entropy[n].item() == pytest.approx(-(pi * logs[t - 1]).sum().item(), rel=1e-9)
            n += 1
    assert n == len(found.entropy)


def test_policy_loss_of_soft_actor_critic_does_not_move_the_critic_nor_its_own_loss_the_policy() -> None:
    case = new_case(chosen_row(find("sac")), groups=2, size=2)
    (batch,) = feed(case, case.rollouts, credit(case.row, board(case, case.rollouts)), [range(4)])
    outputs = case.learner._outputs(case.learner.model, batch, case.row.wants)
    policy, critic = (list(part.parameters.values()) for part in case.learner.parts)
    assert outputs.expected_q is not None and outputs.entropy is not None and outputs.q is not None
    gain = (outputs.expected_q + outputs.entropy).sum()
    assert all(g is None for g in torch.autograd.grad(gain, critic, allow_unused=True, retain_graph=True))
    assert all(g is None for g in torch.autograd.grad(outputs.q.sum(), policy, allow_unused=True, retain_graph=True))
    assert outputs.target_q is not None
    # where a gradient flows into the target, it is only through the policy's own probabilities, which the loss detaches
    assert case.row.critic is not None
    loss = case.row.critic(outputs, batch, Stats()).sum()
    assert all(g is None for g in torch.autograd.grad(loss, policy, allow_unused=True))


def test_slow_copies_move_by_tau_after_every_update() -> None:
    case = new_case(chosen_row(find("sac")), groups=2, size=2)
    critic = case.learner.critic
    assert isinstance(critic, ActionValueModel) and case.learner.optimization.critic_follow == 0.1
    slow = [flat(critic.slow_backbone), critic.slow_heads.clone()]
    batches = feed(case, case.rollouts, credit(case.row, board(case, case.rollouts)), [range(4)])
    case.learner.update(batches, PolicyObjective(case.row))
    own = [flat(critic.backbone), critic.heads.detach()]
    now = [flat(critic.slow_backbone), critic.slow_heads]
    for before, target, after in zip(slow, own, now, strict=True):
        assert torch.allclose(after, before + 0.1 * (target - before), atol=1e-12)
    assert all(not p.requires_grad for p in [*critic.slow_backbone.parameters(), critic.slow_heads])


def test_success_is_told_before_any_shaping() -> None:
    case = new_case(chosen_row(find("vapo")))
    scores = board(case, case.rollouts)
    assert scores.success is not None
    assert scores.success.tolist() == [float(r.reward) >= SUCCESS for r in case.rollouts]  # type: ignore[arg-type]


def test_formula_of_the_critic_s_loss_says_what_it_is_set_to() -> None:
    assert Value(None, 0.5).formula == "0.5 x (V - R)^2 / 2"
    assert Value(None, lam=0.9, warmup=3).formula == (
        "0.1 x (V - R)^2 / 2, R with lambda 0.9; alone for the first 3 steps"
    )


def test_value_network_of_soft_actor_critic_is_apart_from_its_action_values_and_its_slow_copy_alone_follows() -> None:
    case = new_case(chosen_row(find("sac-v")), groups=2, size=2)
    learner, critic = case.learner, case.learner.critic
    assert isinstance(critic, SoftStateValueModel) and learner.optimization.critic_follow == 0.1
    shared = {id(p) for p in critic.backbone.parameters()} & {id(p) for p in critic.state.parameters()}
    assert not shared and all(not p.requires_grad for p in critic.slow_state.parameters())
    (batch,) = feed(case, case.rollouts, credit(case.row, board(case, case.rollouts)), [range(4)])
    slow, actions = flat(critic.slow_state), flat(critic.backbone)
    learner.update([batch], PolicyObjective(case.row))
    assert not torch.equal(flat(critic.backbone), actions)
    assert torch.allclose(flat(critic.slow_state), slow + 0.1 * (flat(critic.state) - slow), atol=1e-12)
    assert not torch.equal(flat(critic.slow_state), slow)
