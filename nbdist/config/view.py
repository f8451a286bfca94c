"""View of `%dist_config`: a strategy as configurations, or the findings in a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.config.emit import FORMS, SBATCH
from nbdist.config.launch import Configured
from nbdist.config.report import Checked
from nbdist.config.strategy_file import FileStrategy
from nbdist.core.view import View, verdicts
from nbdist.strategy.choice import described


@dataclass(frozen=True, slots=True)
class CheckView(View):
    """A View of what was found in a file; in the corrected text, where one was written."""

    checked: Checked | None = None


def checked(result: Checked, done: Sequence[str] = (), name: str = "") -> CheckView:
    """The findings as a table with their lines; below why, and what to change to what.

    `done` stands above; `name` is that of the file where it is another one by now.
    """
    title = f"{name or result.document.name}: "
    view = verdicts(result.findings, before=done, title=title, none="nothing to change")
    return CheckView(view.text, view.html, result.is_bad, checked=result)


def corrected(before: Checked, after: Checked, change_lines: Sequence[str], path: str) -> CheckView:
    """View of the changes, a line each, and of the findings in the corrected file at a path."""
    changes = [f"  {line}" for line in change_lines] or ["  none: there is no automatic correction"]
    was = "could not run" if before.is_bad else "could run"
    lines = [f"{before.document.name} {was}; {path} is written with these changes:", *changes, ""]
    return checked(after, lines, path)


def configured(config: Configured) -> View:
    """Every form that the strategy has, under a heading; why it has no others."""
    setting = config.setting
    hosts = f" on {setting.hosts} hosts" if setting.hosts > 1 else ""
    head = f"{described(setting.choice)}: {setting.choice.world_size} ranks{hosts}"
    parts = [head, *config.notes]
    for form in FORMS:
        if form in config.texts:
            parts += ["", f"--- {form}", config.texts[form].rstrip()]
        else:
            parts += ["", f"--- {form}: none", config.refused[form]]
    return View("\n".join(parts))


def written(config: Configured, form: str, path: str) -> View:
    """Which file was written, how it is used, and what it does not say."""
    name, script = shlex.quote(path), shlex.quote(config.setting.script)
    uses = {
        "accelerate": f"accelerate launch --config_file {name} {script}",
        "deepspeed": f"deepspeed_config_file: {name} in a YAML of Accelerate",
        "transformers": f"from_pretrained(..., distributed_config=DistributedConfig(**json.load("
        f"open({path!r}))))",
        "torchrun": f"sh {name}",
        SBATCH: f"sbatch {name}",
    }
    head = f"{path}: {described(config.setting.choice)}"
    return View("\n".join([head, *config.notes, f"use it with: {uses[form]}"]))


def left_lines(strategy: FileStrategy) -> list[str]:
    """The keys of an applied file that its strategy here does not have, in a line."""
    if not strategy.left:
        return []
    return [f"The strategy does not have these keys of the file: {', '.join(strategy.left)}"]
