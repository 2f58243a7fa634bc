from __future__ import annotations

import pytest

from gpuprof.errors import InputError
from gpuprof.plugins import load_plugin, plugin_names

BUILTIN = {"share": "gpuprof.domain.share:Share", "broken": "gpuprof.nowhere:Thing"}


def test_a_plugin_is_found_by_its_built_in_name_or_by_its_place() -> None:
    assert load_plugin("policy", "share", BUILTIN) is load_plugin("policy", "gpuprof.domain.share:Share", {})


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"unknown policy 'shares' \(did you mean share\?\)"):
        load_plugin("policy", "shares", BUILTIN)


@pytest.mark.parametrize("name", ["broken", "gpuprof.nowhere:Thing", "gpuprof.domain.share:Nothing"])
def test_what_cannot_be_imported_is_the_users_error(name: str) -> None:
    with pytest.raises(InputError):
        load_plugin("policy", name, BUILTIN)


def test_the_built_in_names_are_listed_in_order() -> None:
    assert plugin_names("policy", BUILTIN) == ("broken", "share")
