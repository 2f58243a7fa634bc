"""Public names and versions of a map's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import quote

_MARK = "@"


@dataclass(frozen=True, slots=True)
class PublicName:
    """Name and version of a model for clients."""

    name: str
    version: str = "1"

    @classmethod
    def of(cls, model: str, path: str | None = None) -> PublicName:
        """Return the name and the version of a model of a map.

        Version 3 of ``resnet50`` is either ``resnet50@3``, or ``resnet50`` from ``…/resnet50/3/model.onnx``, the layout
        of model repositories; other models have version 1. ``model``: name in the map; ``path``: path of the file.

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
    """Return the address of a map's model: of the version in its name, else of the newest version.

    Examples
    --------
    >>> model_address("resnet50")
    '/v2/models/resnet50'
    """
    public = PublicName.of(model)
    return f"/v2/models/{quote(model, safe='')}" if public.name == model else public.address


def version_order(version: str) -> tuple[int, str]:
    """Return a sort key for versions, from the oldest to the newest.

    Examples
    --------
    >>> sorted(["10", "9", "2"], key=version_order)
    ['2', '9', '10']
    """
    return (int(version), "") if version.isdigit() else (-1, version)


def _is_version(text: str) -> bool:
    # No leading zeros: 3 and 03 would be two addresses of the same version.
    return text.isascii() and text.isdigit() and len(text) < 10 and text == str(int(text))
