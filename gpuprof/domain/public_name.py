"""The name and version by which clients request a model of a map."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import quote

_MARK = "@"


@dataclass(frozen=True, slots=True)
class PublicName:
    """A model as clients know it."""

    name: str
    version: str = "1"

    @classmethod
    def of(cls, model: str, path: str | None = None) -> PublicName:
        """Return the name and the version of a model of a map.

        ``resnet50@3`` is version 3 of ``resnet50``, and so is ``resnet50`` from ``…/resnet50/3/model.onnx``, as model
        repositories keep their files; anything else is version 1. ``model``: its name in the map; ``path``: of its
        file.

        Examples
        --------
        >>> PublicName.of("resnet50@3")
        PublicName(name='resnet50', version='3')
        >>> PublicName.of("resnet50", "models/resnet50/4/model.onnx").address
        '/v2/models/resnet50/versions/4'
        """
        name, mark, version = model.rpartition(_MARK)
        if mark and name and _is_version(version):
            return cls(name, version)
        folders = PurePath(path or "").parent.parts
        if len(folders) > 1 and folders[-2] == model and _is_version(folders[-1]):
            return cls(model, folders[-1])
        return cls(model)

    @property
    def address(self) -> str:
        """Path of this version in the Open Inference Protocol."""
        return f"/v2/models/{quote(self.name, safe='')}/versions/{quote(self.version, safe='')}"


def model_address(model: str) -> str:
    """Return where a client that has a map finds one of its models: the version that its name says, else the newest.

    Examples
    --------
    >>> model_address("resnet50")
    '/v2/models/resnet50'
    """
    public = PublicName.of(model)
    return f"/v2/models/{quote(model, safe='')}" if public.name == model else public.address


def version_order(version: str) -> tuple[int, str]:
    """Return a key that sorts versions from the oldest to the newest.

    Examples
    --------
    >>> sorted(["10", "9", "2"], key=version_order)
    ['2', '9', '10']
    """
    return (int(version), "") if version.isdigit() else (-1, version)


def _is_version(text: str) -> bool:
    # No leading zeros: versions 3 and 03 would have two addresses and mean the same number.
    return text.isascii() and text.isdigit() and len(text) < 10 and text == str(int(text))
