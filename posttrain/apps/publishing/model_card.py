"""The model card of a checkpoint: README.md with the metadata that the hub reads, in the form of its documentation.

https://huggingface.co/docs/hub/model-cards. It holds names of task files and counts, and no row of them; of paths only the
last part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.apps.publishing.card_figures import FigureRow
from posttrain.apps.publishing.private_text import code, fenced, plain, without_folders, without_secrets
from posttrain.apps.publishing.published_run import Published, architecture
from posttrain.config.held_out_sets import held_out_sets
from posttrain.models.checkpoint_folder import OURS
from posttrain.runs.run_files import CURVES
from posttrain.runs.run_options import LEFT, changed, typed
from posttrain.system.hub import HubName, hub_name

RUN_KEY = "posttrain_run"
"""The entry of the metadata that names the run: a later push of the same run may replace what is there."""
DATA = ("tasks", "ptx", "forget")
"""Options that name data."""
TEXTS = ("system", "stop", "step_delimiter", "prompt_template", "response_template")
"""Options whose values are not paths, even if they look like paths."""


def metadata(published: Published, licence: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries that the hub reads."""
    about, folder = published.about, published.folder
    verb = str(about.get("verb", ""))
    kind = str(architecture(folder).get("model_type", ""))
    names = [verb, _algorithm(about), "lora" if published.adapter else ""]
    library = "peft" if published.adapter else "posttrain" if kind == OURS else "transformers"
    base = published.base
    data = [name for name in map(hub_name, map(str, _data(about).values())) if name is not None]
    return {
        **(
            {"base_model": base.name, "base_model_relation": "adapter" if published.adapter else "finetune"}
            if base
            else {}
        ),
        **licence,
        "library_name": library,
        "pipeline_tag": _pipeline(folder, verb),
        "tags": ["posttrain", *dict.fromkeys(filter(None, names))],
        **({"datasets": [name.name for name in data if not Path(str(name)).exists()]} if data else {}),
        RUN_KEY: published.identity,
    }


def _pipeline(folder: Path, verb: str) -> str:
    config = architecture(folder)
    if verb == "reward-model" or "SequenceClassification" in str(config.get("architectures")):
        return "text-classification"
    return "image-text-to-text" if "vision_config" in config else "text-generation"


def _algorithm(about: Mapping[str, Any]) -> str:
    """Return the algorithm of a run, "" for none; of one's own, mine.py:name without its folder."""
    return str(without_folders(about.get("config", {}).get("algorithm") or ""))


def _data(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the data that a run read: option -> name."""
    config = about.get("config", {})
    found = {name: config[name] for name in DATA if isinstance(config.get(name), str) and config[name]}
    found |= {
        f"eval_tasks {name}".rstrip(): rows for name, rows in held_out_sets(config.get("eval_tasks") or ()).items()
    }
    mixture = config.get("mixture")
    for part, own in mixture.items() if isinstance(mixture, dict) else ():
        found |= {f"mixture {part}": own["tasks"]} if isinstance(own, dict) and own.get("tasks") else {}
    return found


def card(
    published: Published, target: HubName, licence: Mapping[str, str], figures: Sequence[FigureRow], curves: bool
) -> str:
    """Return the text of README.md. `curves`: whether their picture is beside it."""
    entries = metadata(published, licence)
    front = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in entries.items())
    parts = [f"---\n{front}\n---", f"# {target.name.partition('/')[2]}", _summary(published), *_use(published, target)]
    parts += _training(published, curves)
    if figures:
        parts += ["## Evaluation", _figures(figures)]
    parts += _run(published)
    return without_secrets("\n\n".join(parts) + "\n")


def _summary(published: Published) -> str:
    base, about = published.base, published.about
    kind = "A LoRA adapter of" if published.adapter else "A fine-tuned"
    link = f"[{base.name}](https://huggingface.co/{base.name})" if base else "model"
    at = f" at revision `{base.revision}`" if base and base.revision else ""
    if not about:
        return f"{kind} {link}{at}, published with posttrain {__version__}."
    if about.get("initial") is None and base is None:
        kind, link = "A", "model trained from scratch"
    stages = (
        " after " + ", ".join(f"`posttrain {verb}`" for verb in published.stages[:-1]) if published.stages[1:] else ""
    )
    algorithm = _algorithm(about)
    way = code(f"posttrain {about['verb']}") + (f" with {code(algorithm)}" if algorithm else "")
    return f"{kind} {link}{at}{stages}, trained with {way}: step {published.step}."


def _use(published: Published, target: HubName) -> Iterator[str]:
    """Yield how to load it."""
    name = json.dumps(target.name)
    reward = _pipeline(published.folder, str(published.about.get("verb", ""))) == "text-classification"
    kind = "SequenceClassification" if reward else "CausalLM"
    if architecture(published.folder).get("model_type") == OURS:
        yield f"## Use\n\n```shell\nposttrain rl --reward-model {target} ...\n```"
    elif published.adapter:
        yield (f"## Use\n\n```python\nfrom peft import AutoPeftModelFor{kind}\n\n"
               f"model = AutoPeftModelFor{kind}.from_pretrained({name})\n```")  # fmt: skip
    else:
        yield (f"## Use\n\n```python\nfrom transformers import AutoModelFor{kind}, AutoTokenizer\n\n"
               f"model = AutoModelFor{kind}.from_pretrained({name})\n"
               f"tokenizer = AutoTokenizer.from_pretrained({name})\n```")  # fmt: skip
    if not reward:
        yield f"Or `posttrain chat {target}`."


def _training(published: Published, curves: bool) -> Iterator[str]:
    about = published.about
    if not about:
        return
    yield "## Training"
    if about.get("objective"):
        yield fenced("\n".join(map(str, about["objective"])), "text")
    if curves:
        yield f"![Metrics over the steps of the run]({CURVES})"
    lines = [f"- {plain(without_folders(str(line)))}" for line in about.get("sizes") or []]
    for name, source in _data(about).items():
        read = about.get("inputs", {}).get(name)
        size = ""
        if isinstance(read, dict) and "bytes" in read:
            size = f", {read['bytes']:,} bytes, fingerprint `{str(read.get('digest'))[:12]}`"
        lines.append(f"- {plain(name.replace('_', '-'))}: {code(_last(source))}{size}")
    yield "\n".join(lines)
    yield "The data itself is not part of this repository."


def _last(source: str) -> str:
    """Return the name of a file; that of a dataset of the hub is whole."""
    whole = hub_name(source.partition(":")[0]) is not None and not Path(source).exists() and not Path(source).suffix
    return source if whole else Path(source).name


def _figures(figures: Sequence[FigureRow]) -> str:
    lines = ["| evaluation | figure | value | 95% interval | tasks |", "|---|---|---|---|---|"]
    for row in figures:
        interval = "" if row.low is None or row.high is None else f"[{row.low:.4g}, {row.high:.4g}]"
        units = "" if row.units is None else f"{row.units:,}"
        lines.append(f"| {plain(row.of)} | {plain(row.name)} | {row.mean:.4g} | {interval} | {units} |")
    return "\n".join(lines)


def _run(published: Published) -> Iterator[str]:
    about = published.about
    if not about:
        return
    yield f"## Command\n\n{fenced(command(about), 'shell')}"
    shown = {*LEFT, *options(about)}
    every = {n: without_folders(v) for n, v in about["config"].items() if n not in shown}
    rest = ", ".join(
        f"{n} {json.dumps(v, ensure_ascii=False)}" for n, v in every.items() if v not in (None, "", [], {})
    )
    yield f"<details><summary>All other options, at their defaults</summary>\n\n{code(rest)}\n\n</details>"
    versions = ", ".join(f"{n} {v}" for n, v in (about.get("versions") or {}).items() if v)
    git = about.get("git") or {}
    lines = [f"- versions: {versions}"]
    if git.get("revision"):
        lines.append(f"- git revision: `{git['revision']}`" + (" with changes" if git.get("dirty") else ""))
    lines.append(f"- seed {about.get('seed')}, started {about.get('start')}, ended {about.get('end') or 'not yet'}")
    yield "\n".join(lines)


def options(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from their defaults, by name, without folders of this machine."""
    return {name: value if name in TEXTS else without_folders(value) for name, value in changed(about).items()}


def command(about: Mapping[str, Any]) -> str:
    """Return the command of a run, one option a line."""
    return " \\\n    ".join([f"posttrain {about['verb']}", *typed(about, options(about))])
