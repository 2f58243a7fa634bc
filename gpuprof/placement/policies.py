"""The protocol of policies, and the policies by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gpuprof.errors import GpuprofError, InputError, PluginError, unknown_name
from gpuprof.placement.placement import Placement
from gpuprof.placement.problem import Problem
from gpuprof.plugins import describe_failure, identify, load_plugin, plugin_names, require_methods

#: name → "module:Class"; modules are imported on first use.
BUILTIN: dict[str, str] = {
    "ffd": "gpuprof.placement.published.ffd:FirstFitDecreasing",
    "gpulet": "gpuprof.placement.published.gpulet:Gpulet",
    "gslice": "gpuprof.placement.published.gslice:Gslice",
    "igniter": "gpuprof.placement.published.igniter:Igniter",
    "milp": "gpuprof.placement.published.milp:Milp",
    "optimal": "gpuprof.placement.optimal.optimal:Optimal",
    "parvagpu": "gpuprof.placement.published.parvagpu:ParvaGpu",
    "usher": "gpuprof.placement.published.usher:Usher",
}

DEFAULT = "optimal"


@runtime_checkable
class Policy(Protocol):
    """Decides a placement; plug-ins of the group ``gpuprof.policies`` implement it.

    A policy takes its own options as keyword arguments and keeps no state between problems.
    """

    def place(self, problem: Problem) -> Placement:
        """Return a placement in which every demand is served or named as unplaced.

        The same problem gives the same placement. The result passes `gpuprof.placement.feasibility`.
        """


@dataclass(frozen=True, slots=True)
class ForeignPolicy:
    """A third-party policy called ``name``, whose exceptions become `PluginError`, except `GpuprofError`."""

    name: str
    policy: Policy

    def place(self, problem: Problem) -> Placement:
        """Return the placement of the policy.

        Raises `PluginError` when the policy raises any other exception than a `GpuprofError`, or returns no
        `Placement`.
        """
        try:
            placement = self.policy.place(problem)
        except GpuprofError:
            raise
        except Exception as error:  # plug-ins may raise anything
            raise describe_failure("policy", self.name, self.policy, error) from error
        if not isinstance(placement, Placement):
            raise PluginError(f"the policy {self.name!r} returned a {type(placement).__name__} and no Placement")
        return placement


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, built in and installed, sorted."""
    return plugin_names("policy", BUILTIN)


def make_policy(source: str | Policy, options: Mapping[str, str] | None = None) -> Policy:
    """Return a policy made with ``options``; errors of others' objects are reported as those of a plug-in.

    ``source``: a built-in or installed name, ``"package.module:Class"``, or a policy; ``options``: the policy's own
    options as text, parsed by the types of its fields.

    Raises `InputError` for an unknown policy or option, or a value of the wrong type.

    Examples
    --------
    >>> from gpuprof.placement.contract import demand, problem  # a model of latency that is worked out by hand
    >>> placement = make_policy("ffd").place(problem([demand("resnet", rate_rps=40.0, slo_ms=100.0)]))
    >>> [str(replica.share) for gpu in placement.gpus for replica in gpu.replicas()], placement.unplaced
    (['25%'], ())
    """
    name = identify(source)
    if not isinstance(source, str):
        require_methods("policy", name, source, "place")
        return source if name.startswith("gpuprof.") else ForeignPolicy(name, source)
    factory = load_plugin("policy", name, BUILTIN)
    arguments = _read_options(name, factory, options or {})
    try:
        policy: Policy = factory(**arguments)
    except TypeError as error:
        raise InputError(f"the policy {name!r} cannot be made: {error}", "its fields need defaults") from None
    except GpuprofError:
        raise
    except Exception as error:  # plug-ins may raise anything
        raise describe_failure("policy", name, factory, error) from error
    require_methods("policy", name, policy, "place")
    return policy if name in BUILTIN else ForeignPolicy(name, policy)


def describe_policy(source: str | Policy) -> str:
    """Return the name of a policy, followed by the options of an object that differ from their defaults.

    Examples
    --------
    >>> from gpuprof.placement.published.ffd import FirstFitDecreasing
    >>> describe_policy("ffd"), describe_policy(FirstFitDecreasing())
    ('ffd', 'gpuprof.placement.published.ffd:FirstFitDecreasing')
    """
    if isinstance(source, ForeignPolicy):
        return source.name
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(source) if dataclasses.is_dataclass(source) else ()
    options = [f"{field.name}={value}" for field in fields if (value := getattr(source, field.name)) != field.default]
    return "+".join([identify(source), *options])


def _read_options(policy: str, factory: Any, options: Mapping[str, str]) -> dict[str, object]:
    types = typing.get_type_hints(factory) if dataclasses.is_dataclass(factory) else {}
    types_by_name = {field.name: types[field.name] for field in dataclasses.fields(factory)} if types else {}
    values = {}
    for key, text in options.items():
        name = key.replace("-", "_")
        if name not in types_by_name:
            raise unknown_name(f"option of the policy {policy}", key, sorted(types_by_name))
        values[name] = _value(key, text, types_by_name[name])
    return values


def _value(key: str, text: str, kind: Any) -> object:
    if type(None) in typing.get_args(kind):  # None means that the option is omitted
        (kind,) = (member for member in typing.get_args(kind) if member is not type(None))
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
    if choices is not None:
        if text not in choices:
            raise InputError(f"{key} must be one of {', '.join(choices)} but got {text!r}")
        return text
    if kind is bool:
        if text.lower() not in {"", "true", "false", "yes", "no", "1", "0"}:
            raise InputError(f"{key} must be true or false but got {text!r}")
        return text.lower() in {"", "true", "yes", "1"}
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise InputError(f"{key} must be a number but got {text!r}") from None
    return text
