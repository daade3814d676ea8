// Written by `python -m posttrain.cli.write_types`: verb -> what it learns from.

export const LEARNS = {"sft": "demonstrations", "rl": "rollouts", "prefer": "preferences", "reward-model": "scores", "distill": "rollouts", "eval": "", "check": "", "sample": "", "label": ""};
