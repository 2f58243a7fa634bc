"""Options of verbs, made from settings: names, types, defaults, headings and errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from gpuprof.cli.main import VERBS, build_app, load_verb
from gpuprof.cli.options import Verbs, check_output_file, check_output_folder
from gpuprof.domain.validation import Count, parse_duration
from gpuprof.errors import InputError
from gpuprof.pipeline.settings import Dims, Settings, command_line, option


class Colours(Settings):
    """Colours of a wall."""

    title: ClassVar[str] = "Colours"

    front: str = option("red", "Colour in front.")
    behind: Count | None = option(None, "Colour behind.")
    glossy: bool = option(False, "Shine.")
    dims: Dims = option({}, "Sizes.", "--dim", repeated=True)
    drying_s: float = option(60.0, "Time to dry.", "--drying", unit="s", panel="Times")
    brush: Path | None = option(None, "Brush.")


def paint(
    colours: Colours,
    surface: Annotated[str, typer.Argument()] = "wall",
    coats: Annotated[int, typer.Option(help="How often.")] = 1,
) -> None:
    """Paint SURFACE."""
    typer.echo(f"{surface} {coats} {colours.model_dump(exclude_defaults=True)}")


def run(*words: str) -> tuple[int, str, BaseException | None]:
    app = Verbs(add_completion=False)
    app.command()(paint)
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output, result.exception


def test_fields_of_settings_are_options_with_their_defaults_beside_other_parameters() -> None:
    assert run()[:2] == (0, "wall 1 {}\n")
    words = ["door", "--front", "blue", "--behind", "3", "--glossy", "--coats", "2", "--brush", "b"]
    assert run(*words)[1] == ("door 2 {'front': 'blue', 'behind': 3, 'glossy': True, 'brush': PosixPath('b')}\n")


def test_texts_become_what_the_field_holds() -> None:
    output = run("--dim", "a=1", "--dim", "b=2", "--drying", "2m")[1]
    assert output == "wall 1 {'dims': {'a': 1, 'b': 2}, 'drying_s': 120.0}\n"


def test_settings_become_the_command_line_that_they_were_read_from() -> None:
    colours = Colours(front="blue", behind=3, glossy=True, dims={"a": 1, "b": 2}, drying_s=120.0, brush=Path("b"))
    words = colours.list_words(without=("brush",))
    assert words == ["--behind=3", "--dim=a=1", "--dim=b=2", "--drying=120.0", "--front=blue", "--glossy"]
    assert Colours().list_words() == []


def test_a_wrong_value_is_reported_under_the_name_of_its_option() -> None:
    error = run("--behind", "0")[2]
    assert isinstance(error, InputError)
    assert str(error) == "--behind must be greater than or equal to 1 but got 0"
    with pytest.raises(InputError, match=r"^behind of Colours must be a whole number but got 'x'$"):
        Colours(behind="x")
    with pytest.raises(TypeError, match="unexpected keyword argument 'back'"):
        Colours(back="red")  # type: ignore[call-arg]


def sections(page: str) -> dict[str, list[str]]:
    """Return the long option names of a help by the heading that they stand under."""
    listed: dict[str, list[str]] = {}
    for line in page.splitlines():
        if heading := re.match(r"╭─ (.+?) ─", line):
            listed[heading[1]] = []
        elif listed and (option := re.match(r"│ (?:[* ]  )?(--[\w-]+)", line)):
            listed[list(listed)[-1]].append(option[1])
    return listed


def list_verbs() -> list[tuple[str, Callable[..., None]]]:
    """Return every verb by the words that call it."""
    listed = []
    for verb in VERBS:
        defined = load_verb(verb)
        is_group = isinstance(defined, typer.Typer)
        group, words = (defined, f"{verb} ") if is_group else (build_app([verb]), "")
        for info in group.registered_commands:
            assert info.callback is not None
            listed.append((words + (info.name or info.callback.__name__), info.callback))
    return listed


@pytest.mark.parametrize(("words", "function"), list_verbs())
def test_every_setting_of_a_verb_is_an_option_under_its_heading(words: str, function: Callable[..., None]) -> None:
    hints: dict[str, Any] = get_type_hints(function.__wrapped__)  # type: ignore[attr-defined]
    groups = [kind for kind in hints.values() if isinstance(kind, type) and issubclass(kind, Settings)]
    page = CliRunner().invoke(build_app([words.split()[0]]), [*words.split(), "--help"]).output
    shown = sections(page)
    for group in groups:
        assert group() is not None, "settings need no argument"
        for field in group.model_fields.values():
            presentation = command_line(field)
            assert shown[presentation.panel or group.title], field
    options = sum(map(len, shown.values()))
    assert options == len(set().union(*shown.values()))
    assert options >= sum(len(group.model_fields) for group in groups)


def test_directories_and_what_may_not_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="it is a directory"):
        check_output_file(tmp_path)
    assert check_output_file(tmp_path / "new") == tmp_path / "new"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for check in (check_output_file, check_output_folder):
        with pytest.raises(InputError, match="permission denied"):
            check(tmp_path / "new")


#: Options that are numbers of a unit, by verb, and what 500ms is in it.
OPTIONS = {
    "place": {"--time-limit": 0.5},
    "compare": {"--time-limit": 0.5},
    "profile": {"--time-limit": 0.5},
    "calibrate": {"--time-limit": 0.5},
    "serve": {"--hang-s": 0.5, "--adapt-period": 0.5},
    "simulate": {"--host-ms": 500.0},
}
#: Arguments that a verb cannot be without.
FILES = {"profile": ["m.onnx"], "calibrate": ["m.onnx", "n.onnx"], "simulate": ["map.json"]}


def read(verb: str, option: str, text: str) -> Any:
    """Return what an option of a verb makes of a text."""
    group: Any = typer.main.get_command(build_app([verb]))
    command = group.commands[verb]
    name = next(parameter.name for parameter in command.params if option in parameter.opts)
    return command.make_context(verb, [option, text, *FILES.get(verb, ())]).params[name]


@pytest.mark.parametrize(("verb", "option"), [(verb, name) for verb, names in OPTIONS.items() for name in names])
def test_options_of_time_take_units_and_numbers_alone_in_their_own(verb: str, option: str) -> None:
    expected = OPTIONS[verb][option]
    assert read(verb, option, "500ms") == expected
    assert read(verb, option, "0.5 s") == expected
    assert read(verb, option, f"{expected:g}") == expected
    with pytest.raises(InputError, match=f"cannot read {option} from '-1'"):
        read(verb, option, "-1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("3s", 3.0), ("1e-3", 1e-3), ("2m", 120.0), ("1.5 min", 90.0), ("1d", 86400.0)]
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
