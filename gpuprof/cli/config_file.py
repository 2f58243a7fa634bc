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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpuprof.domain.file_access import refuse_pipe
from gpuprof.errors import InputError, unknown_name

FLAG = "--config"
_MAX_BYTES = 1 << 20
_FLAGS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_NULL = ("", "~", "null")


class _Loader(yaml.BaseLoader):
    """Reads every value as a text, and refuses repeated keys, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping."""
        keys = [str(key.value) for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.MarkedYAMLError(problem=f"{twice} stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=True)


@dataclass(frozen=True, slots=True)
class YamlFile:
    """Content of a YAML file: texts, lists and mappings, whose lines messages name."""

    path: Path
    root: yaml.Node | None
    content: Any  #: None for an empty file.

    def error(self, where: Sequence[str | int], error: InputError) -> InputError:
        """Return the error, its message prefixed by the file and the line of the value at ``where``."""
        return InputError(f"{self.path}:{self._find_line(where)}: {error.message}", error.fix)

    def _find_line(self, where: Sequence[str | int]) -> int:
        """Return the line of the value at ``where``, or of the nearest value above it; of an entry its key's line."""
        node, line = self.root, 1 if self.root is None else self.root.start_mark.line + 1
        for part in where:
            entries: Sequence[tuple[yaml.Node, yaml.Node]] = ()
            if isinstance(node, yaml.MappingNode):
                entries = [(key, value) for key, value in node.value if key.value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and str(part).isdigit():
                entries = [(value, value) for value in node.value[int(part) :]]
            if not entries:
                break
            line, node = entries[0][0].start_mark.line + 1, entries[0][1]
        return line


def read_yaml(path: Path, contents: str) -> YamlFile:
    """Return the content of a YAML file of ``contents``.

    Raises `InputError` when the file cannot be read, is too large, or is no YAML.
    """
    try:
        if refuse_pipe(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB", f"which no file of {contents} is")
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        return YamlFile(path, root, None if root is None else loader.construct_document(root))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}", f"name a YAML file of {contents}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
        line = "" if mark is None else f":{mark.line + 1}"
        fix = "leave out the line ---" if "another document" in problem else "indent with spaces, each key once"
        raise InputError(f"{path}{line} is not YAML: {problem}", fix) from None


def take_config(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return a command line without its ``--config FILE``, and the file.

    Raises `InputError` when no file follows, or there are two.
    """
    rest: list[str] = []
    files: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            rest += [word, *remaining]
        elif word == FLAG:
            files.append(next(remaining, ""))
        elif word.startswith(f"{FLAG}="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    if "" in files or len(files) > 1:
        raise InputError(f"{FLAG} takes one file but got {len([file for file in files if file])}", f"{FLAG} FILE")
    return rest, Path(files[0]) if files else None


def read_config(path: Path, group: Any, verbs: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of a group's commands, in click's form.

    Raises `InputError` with the line: no YAML, an unknown verb or option, or an impossible value. ``group``: group of
    the commands that may run; options of other commands are not read; ``verbs``: names of all commands.
    """
    file = read_yaml(path, "options")
    defaults: dict[str, Any] = {}
    for verb, options in read_entries(file, (), file.content or {}, "a verb").items():
        if verb not in verbs:
            raise file.error((verb,), unknown_name("verb", verb, list(verbs)))
        if verb in group.commands:
            defaults[verb] = _read_defaults(file, (verb,), options, group.commands[verb])
    return defaults


def _read_defaults(file: YamlFile, where: tuple[str, ...], content: object, command: Any) -> dict[str, Any]:
    """Return the defaults of a command, or of the commands of a group."""
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if not inner:
        return read_options(file, where, content, command)
    defaults = {}
    for name, options in read_entries(file, where, content, "a command").items():
        if name not in inner:
            raise file.error((*where, name), unknown_name(f"command of {command.name}", name, [*inner]))
        defaults[name] = _read_defaults(file, (*where, name), options, inner[name])
    return defaults


def read_entries(file: YamlFile, where: Sequence[str | int], content: object, entries: str) -> dict[str, Any]:
    """Return a mapping of the file. Raises `InputError` for anything else."""
    if not isinstance(content, dict):
        raise file.error(where, InputError(f"expected {entries} on each line, as in NAME: …"))
    return content


def read_options(
    file: YamlFile, where: Sequence[str | int], content: object, command: Any, extras: Sequence[str] = ()
) -> dict[str, Any]:
    """Return values by the names of a command's parameters: texts, flags, or lists where a parameter takes several.

    Raises `InputError` for an unknown option or an impossible value. ``extras``: further keys, which are not read.
    """
    options, values = list_options(command), dict[str, Any]()
    for name, value in read_entries(file, where, content, "an option").items():
        if name in extras:
            continue
        if name not in options:
            raise file.error((*where, name), unknown_name(f"option of {command.name}", name, [*options, *extras]))
        try:
            option_value = _read_value(value, options[name])
        except InputError as error:
            raise file.error((*where, name), error) from None
        if option_value is not None:
            values[options[name].name] = option_value
    return values


def list_options(command: Any) -> dict[str, Any]:
    """Return the parameters of a command by their names on the command line."""
    return {
        name: parameter
        for parameter in command.params
        if parameter.name != "help"
        for name in {word.lstrip("-") for word in parameter.opts if not word.startswith("-") or word.startswith("--")}
    }


def _read_value(value: object, parameter: Any) -> Any:
    several = parameter.multiple or parameter.nargs == -1
    values = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if isinstance(value, dict) or (isinstance(value, list) and len(values) < len(value)):
        raise InputError("an option takes a value or a list of values")
    if value in _NULL:
        return None
    if not getattr(parameter, "is_flag", False):
        return values if several else ",".join(values)
    if str(value).lower() not in _FLAGS:
        raise InputError(f"{parameter.name} takes true or false but got {value!r}")
    return _FLAGS[str(value).lower()]
