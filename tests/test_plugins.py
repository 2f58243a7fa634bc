import pytest

from gpuprof.errors import InputError, PluginError
from gpuprof.placement.contract import demand, problem
from gpuprof.placement.placement import Placement
from gpuprof.placement.policies import make_policy
from gpuprof.placement.problem import Problem
from gpuprof.plugins import load_plugin, plugin_names

BUILTIN = {"share": "gpuprof.domain.share:Share", "broken": "gpuprof.nowhere:Thing"}


def test_a_plugin_is_found_by_its_built_in_name_or_by_its_place() -> None:
    assert plugin_names("policy", BUILTIN) == ("broken", "share")
    assert load_plugin("policy", "share", BUILTIN) is load_plugin("policy", "gpuprof.domain.share:Share", {})


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"unknown policy 'shares' \(did you mean share\?\)"):
        load_plugin("policy", "shares", BUILTIN)


@pytest.mark.parametrize("name", ["broken", "gpuprof.nowhere:Thing", "gpuprof.domain.share:Nothing"])
def test_what_cannot_be_imported_is_the_users_error(name: str) -> None:
    with pytest.raises(
        InputError, match=r"'gpuprof.nowhere:Thing'|module 'gpuprof.domain.share' has no class 'Nothing'"
    ):
        load_plugin("policy", name, BUILTIN)


class RaisingPolicy:
    def place(self, problem: Problem) -> Placement:
        raise KeyError("resnet50")


class UnmadePolicy:
    def __init__(self) -> None:
        raise ValueError("no table")


class EmptyPolicy:
    def place(self, problem: Problem) -> None:
        return None


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("RaisingPolicy", r"'.*:RaisingPolicy' failed in line \d+ of test_plugins.py: KeyError: 'resnet50'"),
        ("UnmadePolicy", r"'.*:UnmadePolicy' failed in line \d+ of test_plugins.py: ValueError: no table"),
        ("EmptyPolicy", r"'.*:EmptyPolicy' returned a NoneType and no Placement"),
    ],
)
def test_a_policy_of_others_that_fails_is_named_with_its_line(plugin: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        make_policy(f"{__name__}:{plugin}").place(problem([demand("resnet", 40.0, 100.0)]))
    assert raised.value.exit_code == 3
