"""Resolves options: they are filled in, checked, and carried over when a run continues."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_origin, get_type_hints

from posttrain.algorithms.all_algorithms import find, find_preference, find_reward_model
from posttrain.algorithms.settings import change, check_ranges
from posttrain.config.curriculum_options import check_curriculum
from posttrain.config.inference import Chat, Check, Evaluation, Label, Sample, ServePolicy
from posttrain.config.known_trackers import check_trackers
from posttrain.config.mixture_options import check_mixture, parts_of
from posttrain.config.option_groups import on_resume
from posttrain.config.row_options import FromRows
from posttrain.config.search_options import check_search
from posttrain.config.service_options import SERVICES, ScorerOption, implying, named_services
from posttrain.config.training import RL, ROLES, Distill, Passes, Prefer, RewardModelling, Training
from posttrain.core import user_files
from posttrain.core.coerce import convert, fits
from posttrain.core.component import setting_of
from posttrain.core.messages import dashed, near_or_all
from posttrain.core.option_aliases import suggestion
from posttrain.core.types import UserError

AnyTraining = TypeVar("AnyTraining", bound=Training)
AnyConfig = TypeVar("AnyConfig", bound=FromRows)


def validate(config: Training | Evaluation | Check | Sample | Label | Chat | ServePolicy) -> None:
    """Refuse numbers that make no sense, in one line each. Values that depend on data or model are checked elsewhere."""
    check_bounds(config)
    _validate_texts(config)
    if isinstance(config, Label):
        return _validate_label(config)
    if isinstance(config, Chat):
        _services(config)
        return None
    if isinstance(config, ServePolicy):
        if not config.model:
            raise UserError("--model is missing: give the folder of a checkpoint or of a run")
        return None
    mixed = isinstance(config, RL | Passes) and bool(config.mixture)
    if isinstance(config, RL | Passes):
        check_mixture(config)
    if isinstance(config, Passes) and config.steps is not None and "epochs" in config.given and not config.resume:
        raise UserError(
            f"--steps {config.steps} and --epochs {config.epochs:g} both set the length of the run: leave out one of them"
        )
    if not config.tasks and not mixed:
        raise _without_tasks(config)
    if isinstance(config, Training):
        _validate_algorithm(config)
        _validate_record(config)
        _validate_evaluations(config)
        _validate_optimizer(config)
        check_divisions(config)
        _validate_memory(config)
    if isinstance(config, RL):
        _validate_engines(config)
    if isinstance(config, RL | Evaluation | Check | Sample):
        names = _services(config)
        searched = isinstance(config, Sample) and bool(config.search)
        if not (config.env or mixed or searched) and names:
            raise UserError(
                f"--env is missing: give an environment that uses {', '.join(names)} with Ask and returns a reward"
            )
    if isinstance(config, RL | Evaluation | Check) and not isinstance(config, Distill) and not (config.env or mixed):
        raise UserError(
            "--env is missing: give what scores the replies, such as my.py:reward or a built-in name (gsm8k); or "
            "--reward-model, or --judge"
        )
    if isinstance(config, Evaluation):
        _validate_figures(config)
        _validate_against(config)
        check_search(config, config.env, (config.temperature,), config.top_k)
    if isinstance(config, Prefer | RewardModelling | RL | Evaluation | Sample) and not config.model:
        raise UserError("--model is missing: give the folder of a checkpoint, or of a run of posttrain sft")
    if isinstance(config, Distill) and not (config.teacher or config.teachers):
        raise UserError("--teacher is missing: give the folder of a model with the student's tokenizer, or of a run")
    if isinstance(config, RL):
        _validate_rl(config)
    if isinstance(config, Sample):
        _validate_sample(config)


def _validate_texts(config: Any) -> None:
    if getattr(config, "out", None) == "":
        raise UserError("--out is empty: give a name")
    for name in ("out", "stop", "prompt_template", "response_template", "teacher_prompt_template"):
        value = getattr(config, name, None) or ()
        for text in (value,) if isinstance(value, str) else value:
            if text != text.encode("utf-8", "replace").decode():
                raise UserError(f"{dashed(name)} {text!r:.60} is not valid text: write it in UTF-8")
    if not all(getattr(config, "stop", ())):
        raise UserError("--stop has an empty string, at which every reply would end: leave it out")


def _validate_algorithm(config: Training) -> None:
    """Refuse an unknown algorithm, and settings of a known one, before torch is loaded.

    The settings of rl depend on its components, and the user's own algorithm may load libraries: these come later.
    """
    if isinstance(config, RL) and ":" not in config.algorithm:
        find(config.algorithm)
    elif isinstance(config, Prefer | RewardModelling) and ":" not in config.algorithm:
        known = find_preference if isinstance(config, Prefer) else find_reward_model
        check_ranges(change(known(config.algorithm), config.settings))


def _without_tasks(config: Training | Evaluation | Check | Sample) -> UserError:
    """Return the error for options without --tasks, which may mean to continue a run."""
    if isinstance(config, Training) and not config.overwrite and os.path.isfile(os.path.join(config.out, "run.json")):
        return UserError(
            f"{config.out} already holds a run: --resume continues it; a new one needs --tasks and another --out"
        )
    return UserError("--tasks is missing: give a file of rows, such as train.jsonl")


def _validate_figures(config: Evaluation) -> None:
    """Refuse figures of more replies than a task gets, and best@k without scores."""
    if config.best and not config.scorer:
        raise UserError(
            "--best needs scores: add --scorer, such as reward-model=FOLDER, judge=RECIPE.toml or my.py:reward"
        )
    for name in ("k", "maj", "best"):
        most = max(getattr(config, name) if name in config.given else (), default=0)
        if most > config.samples:
            raise UserError(
                f"--{name} {most} needs {most} replies of each task, and there are {config.samples}: raise --samples, or "
                f"give a smaller --{name}"
            )


def _validate_against(config: Evaluation) -> None:
    ScorerOption(config.scorer).check("--scorer", "a scorer")
    if twice := next((name for name in config.against if config.against.count(name) > 1), None):
        raise UserError(f"--against names {twice} twice: give each model once")
    if not all(config.against):
        raise UserError("--against is empty: give the folder of a checkpoint or of a run, or leave it out")


def profiled_steps(text: str) -> range:
    """Return the steps of `--profile`: "3:5" is steps 3, 4 and 5, and "3" is step 3. Raises UserError for other texts."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"--profile {text:.40} is not a range of steps: write FIRST:LAST, such as 3:5")
    return range(first, last + 1)


def check_divisions(config: Training) -> None:
    """Raise UserError for options that divide models or micro-batches among processes, and do not go together."""
    if config.shard and config.tensor_parallel > 1:
        raise UserError(
            "--shard divides rows of whole matrices, and --tensor-parallel has divided them already: leave out one of them"
        )
    if config.shard_size is not None and not config.shard:
        raise UserError(
            "--shard-size is the number of processes that share weights with --shard: add it, or leave it out"
        )
    if config.expert_parallel > 1 and len(config.divisions) > 1:
        raise UserError(
            f"--expert-parallel leaves all but the experts whole, and {config.divisions[0]} divides them too: leave out one "
            "of them"
        )
    for divided in config.divisions[:1]:
        if config.offload:
            raise UserError(
                f"--offload is for whole models and micro-batches, and {divided} divides them: leave out one of them"
            )
        if config.role_devices:
            raise UserError(
                f"--role-devices is for whole models and micro-batches, and {divided} divides them: leave out one of them"
            )


def _validate_optimizer(config: Training) -> None:
    if (config.optimizer, config.optimizer_options) == ("adamw", {}):
        return
    from posttrain.learners.optimizers import OptimizerChoice  # imports torch

    OptimizerChoice(config.optimizer, config.optimizer_options, config.betas).check(
        next((name for name in config.divisions if name != "--context-parallel"), ""), "optimizer" in config.offload
    )


def _validate_memory(config: Training) -> None:
    if config.weights == "bfloat16":
        _validate_narrow_weights(config)
    if config.float8 and config.precision != "bfloat16":
        raise UserError("--float8 rounds the factors of products further than --precision bfloat16: add it")
    adapted = [name for name, value in (("--lora", config.lora), ("--quantize", config.quantize)) if value]
    for option in (*config.divisions, *adapted) if config.float8 else ():
        raise UserError(f"--float8 is for whole weights that all learn, without {option}: leave out one of them")
    if odd := next((name for name in config.role_devices if name not in ROLES), None):
        raise UserError(f"--role-devices has no role {odd!r:.40}{near_or_all(odd, list(ROLES))}")
    if twice := next((own for own in config.offload if config.offload.count(own) > 1), None):
        raise UserError(f"--offload names {twice} twice: give it once")


def _validate_narrow_weights(config: Training) -> None:
    if config.precision != "bfloat16":
        raise UserError("--weights bfloat16 stores weights in the type of their products: add --precision bfloat16")
    if not config.model:
        raise UserError("--weights bfloat16 is for a pretrained model: give --model, or leave it out")
    if config.lora is not None:
        raise UserError(
            "--weights bfloat16 is for weights that learn, and --lora freezes them: give --frozen-weights bfloat16 instead"
        )
    if config.float8:
        raise UserError("--weights bfloat16 has not been tried with --float8: leave out one of them")


def _validate_record(config: Training) -> None:
    check_trackers(config.track)
    if config.profile:
        profiled_steps(config.profile)
    if not config.record_after:
        return
    if config.record == "tokens":
        raise UserError(
            "--record-after has no effect without --record sample or full: add one of them, or give --no-record-after"
        )
    if isinstance(config, RewardModelling):
        raise UserError("--record-after records log-probabilities, and a reward model has none: leave it out")


def _validate_evaluations(config: Training) -> None:
    if config.eval_every and not (config.held_out or config.eval_tasks or config.eval_suite or config.forget):
        raise UserError(
            f"--eval-every {config.eval_every} has nothing to evaluate on: hold out a share of the rows, as with "
            "--held-out 0.1, or give others with --eval-tasks FILE"
        )


def check_bounds(config: Any) -> None:
    """Raises UserError for a number outside its option's range, and for text that can name no file."""
    for f in fields(config):
        name, value = dashed(f.name), getattr(config, f.name)
        setting_of(f).bounds.check(name, value)
        if "\0" in _texts(value):
            raise UserError(f"{name} contains a null character: remove it")


def _texts(value: Any) -> str:
    """All text in the value of an option, end to end."""
    if isinstance(value, Mapping):
        return _texts([*value, *value.values()])
    return "".join(map(_texts, value)) if isinstance(value, list | tuple) else value if isinstance(value, str) else ""


def _services(config: RL | Evaluation | Check | Sample | Chat) -> list[str]:
    """Names of the services. Raises UserError if two have the same."""
    given = {kind.replace("_", "-"): getattr(config, kind, ()) for kind in SERVICES}
    names = [n for kind, values in given.items() for n, _ in named_services(values, kind)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"two services have the name {twice!r}: give them different names, such as --judge strict=RECIPE"
        )
    return names


def _validate_sample(config: Sample) -> None:
    for name in ("model", "temperature", "top_p", "seed", "search"):
        values = getattr(config, name)
        if not values and name != "search":
            raise UserError(f"{dashed(name)} is empty: give at least one value, or leave it out")
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise UserError(f"{dashed(name)} has {twice!r} twice: the same replies would be sampled again")
    check_search(config, config.env, config.temperature, config.top_k)
    if config.adaptive is not None and config.adaptive <= config.samples:
        raise UserError(
            f"--adaptive {config.adaptive} must be above --samples {config.samples}: raise it, or lower --samples"
        )
    if bool(config.kind) != bool(config.kinds):
        raise UserError(
            "--kind has no effect without --kinds: give the settings of each kind with --kinds, or leave --kind out"
            if config.kind
            else "--kinds needs --kind: give the column that names the kind of a prompt"
        )


def _validate_engines(config: RL) -> None:
    urls = [url.rstrip("/") for url in config.engine_url]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise UserError(f"--engine-url has {twice[0]} twice: give each server once")
    if config.engine == "local":
        named = {"--engine-url": config.engine_url, "--engine-seeds": config.engine_seeds}
        named["--engine-tensor-parallel"] = config.engine_tensor_parallel > 1
        if idle := [name for name, given in named.items() if given]:
            raise UserError(f"{idle[0]} requires --engine vllm or sglang: add it, or leave {idle[0]} out")
    elif config.launch == "ray":
        raise UserError(
            "--launch ray is for the local engine: start servers elsewhere and give --engine-url, or leave out --engine "
            f"{config.engine}"
        )
    if config.engine == "local" and config.weight_sync != "copied":
        servers = "vllm or sglang" if config.weight_sync == "adapter" else "vllm"
        raise UserError(
            f"--weight-sync {config.weight_sync} requires --engine {servers}: add it, or leave --weight-sync out"
        )
    if config.engine == "sglang" and config.weight_sync in ("nccl", "ipc"):
        raise UserError(
            f"--weight-sync {config.weight_sync} requires --engine vllm, since SGLang reads weights from files: leave it out"
        )
    if config.launch == "ray" and not config.replicas:
        raise UserError("--launch ray has no effect without --replicas: add it, or leave --launch out")
    if config.engine_url:
        if config.replicas:
            raise UserError(
                "--engine-url and --replicas exclude each other: servers run already, or the run starts them"
            )
        started: dict[str, object] = {"--engine-devices": config.engine_devices}
        started["--engine-tensor-parallel"] = config.engine_tensor_parallel > 1
        if idle := [name for name, given in started.items() if given]:
            raise UserError(f"{idle[0]} has no effect on servers that run already (--engine-url): leave it out")
    if config.engine_devices and config.engine == "local" and not config.replicas:
        raise UserError(
            "--engine-devices has no effect without engines in processes of their own: add --replicas, or leave it out"
        )
    engines = config.replicas + len(config.engine_url)
    if 0 < engines < config.processes:
        raise UserError(
            f"each of {config.processes} processes needs an engine of its own: give at least {config.processes} "
            "(--replicas, --engine-url)"
        )


def _validate_label(config: Label) -> None:
    ways = [("--with", bool(config.with_)), ("--human", config.human), ("--agreement", config.agreement is not None)]
    given = [name for name, there in ways if there]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other: give one labeller")
    if config.agreement is not None:
        return
    if not config.tasks:
        raise UserError("--items is missing: give a file of rows with responses, such as posttrain sample writes")
    config.labeller.check("--with", "a labeller")
    if config.human and config.flip:
        raise UserError("--flip does not go with --human: label first, then run --items LABELS --flip SHARE")
    if config.human and not config.rater.strip():
        raise UserError("--rater is missing: give the name of the person who labels")
    if not given and not (config.flip or config.best or config.pairs):
        raise UserError(
            "nothing to do: give a labeller (--with reward-model=FOLDER, --with judge=RECIPE.toml, --with "
            "my.py:reward, "
            "--human), or an output for items that have scores (--best FILE, --pairs FILE, --flip SHARE)"
        )
    for option_name, needs in (("top", "best"), ("at_least", "best"), ("pair", "pairs"), ("margin", "pairs")):
        if option_name in config.given and getattr(config, needs) is None:
            raise UserError(f"{dashed(option_name)} has no effect without --{needs} FILE")


def _validate_rl(config: RL) -> None:
    check_curriculum(config)
    parts = {f"--mixture.{name}.temperature": own.temperature for name, own in parts_of(config).items()}
    for option, temperature in {"--temperature": config.temperature, **parts}.items():
        if temperature == 0:
            raise UserError(
                f"{option} 0 is greedy, and equal rollouts of a group give no signal: give a temperature above 0"
            )
    if config.epsilon_greedy and config.engine != "local":
        raise UserError(
            f"servers do not sample with --epsilon-greedy: leave out --engine {config.engine}, or --epsilon-greedy"
        )
    if config.top_p != 1 or config.top_k != 0:
        raise UserError(
            "--top-p and --top-k sample from a truncated distribution, which biases the gradient and which no "
            "--correction undoes: leave them at 1 and 0 in training (evaluation accepts them)"
        )


def continued(config: AnyTraining, recorded: Mapping[str, Any]) -> AnyTraining:
    """The options of a run that is resumed: as recorded in run.json, but for what may change and is given in
    `config`. Raises UserError if another option is given with another value, or if run.json holds a value that its
    option cannot have."""
    now = as_dict(config)
    if unknown := sorted(recorded.keys() - now.keys()):
        raise UserError(f"cannot resume {config.out}: another version wrote it, with options {', '.join(unknown)}")
    if missing := sorted(now.keys() - recorded.keys()):
        raise UserError(f"{config.out}/run.json is damaged (it lacks {', '.join(missing)}): put a copy of it back")
    kinds = get_type_hints(type(config))
    for name, value in recorded.items():
        if not fits(tuple(value) if isinstance(value, list) else value, kinds[name]):  # JSON has no tuples
            raise UserError(f"{config.out}/run.json is damaged ({name} is {str(value)[:40]!r}): put a copy of it back")
    anew, free = (on_resume(type(config), what) for what in ("anew", "free"))
    fixed = sorted(config.given - anew - free)
    pairs = [(name, now[name], recorded.get(name)) for name in fixed if name != "settings"]
    if "settings" in fixed:
        before = recorded.get("settings", {})
        pairs += [(name, value, before.get(name)) for name, value in now["settings"].items()]
    differing = [f"{name} was {old!r}" for name, new, old in sorted(pairs) if new != old]
    if differing:
        other = ", ".join(differing)
        raise UserError(
            f"cannot resume {config.out} with other options ({other}): leave them out, or start a new run from its weights "
            f"in another --out without --resume: --model {config.out}"
        )
    ours = anew | (config.given & free)
    kept = {name: tuple(v) if isinstance(v, list) else v for name, v in recorded.items() if name not in ours}
    chosen: Any = {**kept, **{name: getattr(config, name) for name in ours}}
    return type(config)(**chosen)


def as_dict(config: Any) -> dict[str, Any]:
    """The options by name, as they are read back from JSON: tuples are lists, paths are text."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def chosen_options(config: Any) -> list[str]:
    """The options that differ from their defaults, each with its value as text."""
    default, chosen = as_dict(type(config)()), as_dict(config)
    if implying(chosen):
        del chosen["env"]
    named: list[str] = []
    for name, value in chosen.items():
        if isinstance(value, dict):
            named += _entries(value, "" if name == "settings" else f"{name}.")
        elif value is True and not default[name]:
            named.append(name)
        elif isinstance(value, list | tuple) and value and value != default[name]:
            named.append(" ".join([name, *map(str, value)]))
        elif value != default[name] and value not in (None, "", []):
            named.append(f"{name} {value}")
    return named


def _entries(table: Mapping[str, Any], before: str) -> Iterator[str]:
    """Yield the entries of a table, and of the tables in it, as the command line names them."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{before}{name}.")
        else:
            yield f"{before}{name} {value}"


def filled(kind: type[AnyConfig], options: Mapping[str, Any], where: str = "") -> AnyConfig:
    """The configuration of these options: fields of it and, for rl, flags of its algorithm's settings, values of
    their type. Raises UserError, in one line that begins with `where`, for one that does not exist or does not
    fit."""
    hints = get_type_hints(kind)
    known = {f.name: hints[f.name] for f in fields(kind)}
    settings = kind.flags()
    given: dict[str, Any] = {}
    chosen = dict(options.get("settings") or {})
    for name, value in options.items():
        if name in settings:
            chosen[name] = value
        elif name == "settings":
            continue
        elif name not in known:
            hint = suggestion(name, [*known, *settings]) or f"; there are {', '.join([*known, *settings])}"
            raise UserError(f"{where}unknown option {name!r}{hint}")
        else:
            given[name] = _texts_of_parts(value) if name == "mixture" else value
            if get_origin(known[name]) is dict:
                if not isinstance(value, Mapping):
                    raise UserError(f"{where}{name} must be a dict, not {value!r:.60}")
            else:
                given[name] = convert(value, known[name], f"{where}{name}")
    if chosen:
        given["settings"] = chosen
    return kind(**given)


def _texts_of_parts(mixture: Any) -> Any:
    """The settings of parts as the command line has them: run.json compares them."""
    if not isinstance(mixture, Mapping) or not all(isinstance(own, Mapping) for own in mixture.values()):
        return mixture
    return {
        part: {name: json.dumps(value) if isinstance(value, Mapping) else str(value) for name, value in own.items()}
        for part, own in mixture.items()
    }


def own_judge(file: str) -> str | None:
    """Return the checkpoint that a judge's recipe names, if it is on this machine; its errors are reported later."""
    try:
        recipe = tomllib.loads(user_files.text(file))
    except (OSError, ValueError, RecursionError):
        return None
    model = recipe.get("model")
    return model if isinstance(model, str) and "endpoint" not in recipe else None
