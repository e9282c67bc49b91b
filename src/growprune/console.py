"""Between a person and the commands: options made from fields, files that hold them, plain help, and one line for every
mistake.

What is typed stays text until the option's own check reads it, so that a wrong value is refused in the same words
wherever it comes from.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import typer
from typer.core import TyperCommand

from growprune.config import KINDS, NET, PRUNE, RUN, SPEED, TRAIN
from growprune.errors import GrowpruneError, nearest
from growprune.options import Known, Options, checked, flag, known, listed

Given = dict[str, Any]
"""Options as they were given, by name; the others are not in it."""

INDENT = 26
"""The column where an option's help begins."""


def offered(app: typer.Typer, kind: type[Options], name: str | None = None) -> Callable[..., Callable[..., None]]:
    """Makes a function a command that has every field of `kind` as an option; its first argument is what was given."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        defaults = {each.name: each.default for each in fields(kind)}  # type: ignore[arg-type]
        made = {each: made_option(each, defaults[each], *about) for each, about in known(kind).items()}
        parameters = [
            *(
                inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=o)
                for each, o in made.items()
            ),
            *own,
        ]

        def command(**values: Any) -> None:
            given = {each: values.pop(each) for each in made}
            function({each: read(kind, each, v) for each, v in given.items() if v is not None}, **values)

        command.__doc__, command.__name__ = function.__doc__, function.__name__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, cls=Plain)(command)
        return function

    return decorate


def made_option(name: str, default: Any, kind: Any, about: Any) -> Any:
    """The option of a field, as typer wants it."""
    plain = next((each for each in get_args(kind) if type(None) in get_args(kind)), kind)
    switch, choices = plain is bool, get_args(plain) if get_origin(plain) is Literal else ()
    said = f"{about['help']}: {listed(choices)}." if choices else about["help"]
    shown = "" if default in ("", None, MISSING) else f" [{in_words(default)}]"
    metavar = None if switch else about.get("metavar") or METAVARS.get(plain, "NAME")
    declared = f"{flag(name)}/--no-{flag(name)[2:]}" if switch else flag(name)
    chosen = typer.Option(
        declared, help=said + shown, metavar=metavar, show_default=False, rich_help_panel=about["part"]
    )
    return Annotated[(bool if switch else str) | None, chosen]


METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def in_words(value: Any) -> str:
    """
    >>> in_words(True), in_words(5.0), in_words(1e-5), in_words(256)
    ('yes', '5', '1e-05', '256')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read(kind: type[Options], name: str, value: Any) -> Any:
    """A number where one is wanted and given; else as it is, for the option's check to refuse."""
    hint = known(kind)[name][0]
    for number in (int, float):
        if isinstance(value, str) and (hint is number or number in get_args(hint)):
            try:
                return number(value)
            except ValueError:
                return value
    return value


# -- files ----------------------------------------------------------------------------------------------------------

BESIDE: Known = {"out": (str, {}), "json": (bool, {})}
"""What a file may also hold: options of the commands that are not the run's own."""


def read_file(path: Path, command: str) -> dict[str, Any]:
    """A TOML file: options at the top level hold for every command, those in [train] or [prune] for that one.

    Or a run's config.json.
    """
    found = parsed(path)
    if found.setdefault("command", command) != command:
        raise GrowpruneError(f"{path}: is of the command '{found['command']}', not of {command}")
    del found["command"]
    tables = {name: found.pop(name) for name in list(found) if isinstance(found[name], dict)}
    for name in tables:
        if name not in KINDS:
            there = " and ".join(f"[{kind}]" for kind in KINDS)
            raise GrowpruneError(f"{path}: unknown table [{name}]{nearest(name, KINDS)} (there are {there})")
    shared, *own = (
        taken(path, table, kind) for table, kind in [(found, command), *((t, k) for k, t in tables.items())]
    )
    return {**shared, **dict(zip(tables, own, strict=True)).get(command, {})}


def parsed(path: Path) -> dict[str, Any]:
    wanted = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if wanted == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise GrowpruneError(f"{path}: {error.strerror}; give a TOML file, or a run's config.json") from error
    except (ValueError, RecursionError) as error:
        raise GrowpruneError(f"{path}: not {wanted}: {error}") from error
    if not isinstance(found, dict):
        raise GrowpruneError(f"{path}: not a table of options")
    return found


def taken(path: Path, table: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The options in one table of a file, checked one by one."""
    there, values = {**known(KINDS[command]), **BESIDE}, dict[str, Any]()
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in there:
            others = [other for other, kind in KINDS.items() if name in known(kind)]
            hint = f"; {others[0]} has: put it under [{others[0]}]" if others else nearest(name, there)
            raise GrowpruneError(f"{path}: {command} has no option '{key}'{hint}")
        if name in values:
            raise GrowpruneError(f"{path}: '{key}' is given twice")
        kind, bounds = there[name]
        try:
            values[name] = checked(name, as_text(value, bounds.get("also", ())), kind, bounds)
        except GrowpruneError as error:
            raise GrowpruneError(f"{path}: {error}") from None
    return values


def as_text(value: Any, also: tuple[type, ...]) -> Any:
    """`lr = 0.1`, `ratios = [0, 0.5]` and `ignore = ["fc"]` are natural in TOML; the options are text.

    >>> as_text(0.1, (int, float)), as_text([0, 0.5], (list,)), as_text(["conv1", "fc"], (list,)), as_text(3, ())
    ('0.1', '[0, 0.5]', 'conv1,fc', 3)
    """
    if isinstance(value, bool) or not isinstance(value, also):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return repr(value)


# -- help ------------------------------------------------------------------------------------------------------------


def itself() -> str:
    """How this program is called here: by its path, where it lies in no folder that is searched."""
    script = Path(sys.argv[0])
    found = script.name != "growprune" or shutil.which("growprune") is not None
    return "growprune" if found else os.path.relpath(script)


class Plain(TyperCommand):
    """A command whose help has its options by parts, aligned; plain text, for what is styled takes longer to load."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parts: dict[str, list[tuple[str, str]]] = {part: [] for part in (NET, PRUNE, TRAIN, SPEED, RUN)}
        every = self.get_params(ctx)
        last = RUN if any(getattr(each, "rich_help_panel", None) for each in every) else "Options"
        for each in every:
            part = getattr(each, "rich_help_panel", None) or (last if each.opts[0].startswith("-") else "Arguments")
            parts[part] = [*parts.get(part, []), (spelled(each), getattr(each, "help", None) or "")]
        for part in sorted((name for name, rows in parts.items() if rows), key=lambda name: name != "Arguments"):
            formatter.write(f"\n{part}:\n")
            for left, right in parts[part]:
                lines = textwrap.wrap(right, formatter.width - INDENT) or [""]
                left = f"  {left}".ljust(INDENT)
                first = left + lines[0] if left.endswith("  ") else f"{left}\n{' ' * INDENT}{lines[0]}"
                formatter.write("\n".join([first.rstrip(), *(" " * INDENT + line for line in lines[1:])]) + "\n")


def spelled(parameter: Any) -> str:
    """How an option is written: `--batch N`, `--[no-]augment`, `-h, --help`."""
    if not parameter.opts[0].startswith("-"):
        return str(parameter.metavar or parameter.name)
    if parameter.secondary_opts:
        return f"--[no-]{parameter.opts[0].removeprefix('--')}"
    return ", ".join(sorted(parameter.opts, key=len)) + (f" {parameter.metavar}" if parameter.metavar else "")


# -- mistakes --------------------------------------------------------------------------------------------------------


def spellings(command: Any) -> list[str]:
    return [name for each in command.params for name in (*each.opts, *each.secondary_opts)]


def usage(error: Any) -> str:
    """What is wrong with the command line, the nearest name where one is near, and where to look."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message()).strip().rstrip(".")
    unknown = getattr(error, "option_name", None)
    if unknown and context and type(error).__name__ == "NoSuchOption":
        there, commands = spellings(context.command), getattr(context.find_root().command, "commands", {})
        others = [name for name, command in commands.items() if unknown in spellings(command)]
        elsewhere = f"; it belongs to {listed(others)}" if others else ""
        message = f"no option {unknown}{nearest(unknown, there, 0.8) or elsewhere or nearest(unknown, there)}"
    return f"{message} ({context.command_path if context else 'growprune'} --help lists what there is)"


def fail(message: str) -> NoReturn:
    if not heard():
        time.sleep(10)  # torchrun ends this process once the one that speaks has ended; if not, that one did not fail
    print(f"growprune: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def heard() -> bool:
    """Does this process speak? Those of torchrun's that fail before they have come together all have the same to say;
    afterwards they settle it among themselves."""
    together = sys.modules.get("torch.distributed")
    return os.environ.get("LOCAL_RANK", "0") == "0" or (together is not None and together.is_initialized())
