"""A reward model's loss and gradient on real pairs, by posttrain and by TRL's RewardTrainer, in float32.

    python benchmarks/peers/reward.py ours /tmp/reward-numbers          with posttrain's Python
    .../env-trl/bin/python benchmarks/peers/reward.py theirs /tmp/reward-numbers     with TRL's: compares, and says so

The head is random, the folder is the one that posttrain writes; TRL opens it by transformers and pads on the right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MARGINS = (0.0, 0.5, 1.25, -0.25)
PAIRS = 8


def ours(place: Path, data: Path) -> None:
    """Write the folder, the tokens of the pairs, loss and gradient (under the names of the checkpoint)."""
    import torch
    from safetensors.torch import save_file

    from posttrain.algorithms.all_algorithms import find_reward_model
    from posttrain.algorithms.reward_model_table import RewardModelObjective
    from posttrain.core.batch import Stats
    from posttrain.data.preference_examples import to_item
    from posttrain.data.tasks import to_tasks
    from posttrain.learners.local_learner import LocalLearner, Optimization
    from posttrain.models.native.decoder_writer import checkpoint_tensors
    from posttrain.models.reward_model import ScoreShape, new_reward_model, settle
    from posttrain.models.tokenizer.tokenizer import Tokenizer
    from posttrain.training.sources.length_filter import TooLong
    from posttrain.training.sources.preferences import PreferenceExamples
    from posttrain.training.sources.reward_examples import RewardExamples

    start = data / "models" / "stories260K"
    model = new_reward_model(start, ScoreShape(), seed=0)
    tokenizer = settle(model, Tokenizer.load(start), model.eos_ids)
    model.save(place / "model")
    tokenizer.save(place / "model")
    rows = [json.loads(line) for line in (data / "preferences" / "pairs.jsonl").read_text().splitlines()[:PAIRS]]
    rows = [{**row, "margin": MARGINS[i % len(MARGINS)]} for i, row in enumerate(rows)]
    items = PreferenceExamples(
        to_tasks(rows, convert=to_item), tokenizer, model.eos_ids, model.config.vocab, TooLong("refuse", 512, print)
    )
    made = [item for item in items if item is not None]
    row = find_reward_model("bradley-terry")
    source = RewardExamples(items, row, PAIRS, 300, 0, torch.device("cpu"))
    learner, objective = LocalLearner(model, Optimization()), RewardModelObjective(row)
    total = 0.0
    for _, batch in source.batches(made):
        loss = objective(learner._outputs(model, batch, objective.wants), batch, Stats())
        loss.backward()
        total += loss.item()
    gradient = {"score.weight": model.score.grad}
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    gradient |= dict(checkpoint_tensors(model.backbone))
    save_file({name: g.contiguous() for name, g in gradient.items() if g is not None}, place / "gradient.safetensors")
    examples = [
        {"chosen_ids": i.responses[0].tokens, "rejected_ids": i.responses[1].tokens, "margin": i.comparisons[0].margin}
        for i in made
    ]
    (place / "said.json").write_text(json.dumps({"loss": total, "examples": examples}))


def theirs(place: Path) -> None:
    from datasets import Dataset
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    said = json.loads((place / "said.json").read_text())
    folder = place / "model"
    options: dict[str, Any] = {"output_dir": str(place / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder),
        args=RewardConfig(**options, disable_dropout=True, gradient_checkpointing=False),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list(said["examples"]),
    )
    batch = trainer.data_collator(said["examples"])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    own, gap, most = load_file(place / "gradient.safetensors"), 0.0, 0.0
    for name, parameter in trainer.model.named_parameters():
        gap = max(gap, (parameter.grad - own.pop(name)).abs().max().item())
        most = max(most, parameter.grad.abs().max().item())
    assert not own, f"TRL's model lacks {list(own)}"
    apart = abs(loss.item() - said["loss"])
    print(f"loss {loss.item():.8f} and {said['loss']:.8f}, apart {apart:.1e}; gradient {gap:.1e} of {most:.1e}")
    assert apart < 1e-6 and gap < 5e-5 * max(1.0, most)


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1] == "ours":
        ours(folder, Path(sys.argv[3]) if len(sys.argv) > 3 else Path("../shared/data"))
    else:
        theirs(folder)
