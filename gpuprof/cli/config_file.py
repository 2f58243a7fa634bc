"""Options of verbs from a YAML file; the command line takes precedence.

Each key is a verb, and each key below it an option, named as on the command line without dashes::

    place:
      slo-file: slo.csv
      gpus: a100-80:8
      confidence: 0.9
    db:
      show: {limit: 10}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError, unknown_name

FLAG = "--config"
_MAX_BYTES = 1 << 20


def take_config(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return a command line without its ``--config FILE``, and the file.

    Raises `InputError` when no file follows, or there are two.
    """
    rest: list[str] = []
    files: list[str] = []
    given = iter(words)
    for word in given:
        if word == "--":
            rest += [word, *given]
        elif word == FLAG:
            files.append(next(given, ""))
        elif word.startswith(f"{FLAG}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    if "" in files or len(files) > 1:
        raise InputError(f"{FLAG} takes one file but got {len([one for one in files if one])}", f"{FLAG} FILE")
    return rest, Path(files[0]) if files else None


def read_config(path: Path, group: Any, verbs: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of a group's commands, in click's form.

    Raises `InputError` with the line: no YAML, an unknown verb or option, or an impossible value. ``group``: group of
    the commands that may run; options of other commands are not read; ``verbs``: names of all commands.
    """
    root = read_yaml(path, "options")
    if root is None:
        return {}
    defaults: dict[str, Any] = {}
    for key, value in read_pairs(root, path, "a verb"):
        if key.value not in verbs:
            raise error_at(path, key, unknown_name("verb", key.value, list(verbs)))
        if key.value in group.commands:
            defaults[key.value] = _command_defaults(path, value, group.commands[key.value])
    return defaults


def read_yaml(path: Path, contents: str) -> yaml.Node | None:
    """Return the root of a YAML file, whose nodes know their lines; None for an empty file.

    Raises `InputError` when the file cannot be read, is too large for a file of ``contents``, or is no YAML.
    """
    try:
        if refuse_pipe(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB", f"which no file of {contents} is")
        # Composed, not constructed: nodes know their lines, which messages name, and nothing of the file is run.
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}", f"name a YAML file of {contents}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = str(getattr(error, "problem", None) or error)
        several = "another document" in problem
        raise InputError(
            f"{path}{line} is not YAML: {problem}", "leave out the line ---" if several else "indent with spaces"
        ) from None


def _command_defaults(path: Path, node: yaml.Node, command: Any) -> dict[str, Any]:
    """Return the defaults of a command, or of the commands of a group."""
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    options = {} if inner else list_options(command)
    defaults: dict[str, Any] = {}
    for key, value in read_pairs(node, path, "a command" if inner else "an option"):
        known = inner or options
        if key.value not in known:
            raise error_at(
                path, key, unknown_name(f"{'command' if inner else 'option'} of {command.name}", key.value, [*known])
            )
        if inner:
            defaults[key.value] = _command_defaults(path, value, inner[key.value])
        elif (read := read_value(path, value, options[key.value])) is not None:
            defaults[options[key.value].name] = read
    return defaults


def list_options(command: Any) -> dict[str, Any]:
    """Return the parameters of a command by their names on the command line."""
    return {
        name: parameter
        for parameter in command.params
        if parameter.name != "help"
        for name in {word.lstrip("-") for word in parameter.opts if not word.startswith("-") or word.startswith("--")}
    }


def read_value(path: Path, node: yaml.Node, parameter: Any) -> Any:
    """Return a value in the form of the command line: a text, a flag, or a list where a parameter takes several."""
    several = parameter.multiple or parameter.nargs == -1
    if isinstance(node, yaml.SequenceNode):
        texts = [_scalar(path, one) for one in node.value]
        return texts if several else ",".join(str(text) for text in texts)
    read = _scalar(path, node)
    if read is None:
        return None
    if getattr(parameter, "is_flag", False) is not isinstance(read, bool):
        kind = "true or false" if not isinstance(read, bool) else "a value"
        raise error_at(path, node, InputError(f"{parameter.name} takes {kind} but got {node.value!r}"))
    return [read] if several else read


def _scalar(path: Path, node: yaml.Node) -> str | bool | None:
    if not isinstance(node, yaml.ScalarNode):
        raise error_at(path, node, InputError("an option takes a value or a list of values"))
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in {"true", "yes", "on"}
    return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)


def read_pairs(node: yaml.Node, path: Path, entries: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Return the keys and values of a mapping."""
    if not isinstance(node, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        raise error_at(path, node, InputError(f"expected {entries} on each line, as in NAME: …"))
    return list(node.value)


def error_at(path: Path, node: yaml.Node, error: InputError) -> InputError:
    """Return the error, its message prefixed by the file and the line."""
    return InputError(f"{path}:{node.start_mark.line + 1}: {error.message}", error.fix)
