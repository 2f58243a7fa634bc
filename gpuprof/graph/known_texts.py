"""Texts that a model knows: the categories that it encodes, the words that it counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnx import NodeProto

from gpuprof.graph.file import read_onnx

#: The attribute of an op that holds the texts that it tells apart.
_TEXTS = {
    "OneHotEncoder": "cats_strings",
    "LabelEncoder": "keys_strings",
    "CategoryMapper": "cats_strings",
    "DictVectorizer": "string_vocabulary",
    "TfIdfVectorizer": "pool_strings",
}
#: Ops that take words out of a text, or count several of them.
_OF_WORDS = {"TfIdfVectorizer"}


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """Texts that ops behind an input tell apart.

    Attributes
    ----------
    texts : tuple of str
    are_words : bool
        Whether they are words of longer texts, and not whole values.
    """

    texts: tuple[str, ...]
    are_words: bool


def read_known_texts(path: Path) -> dict[str, KnownTexts]:
    """Return by input the texts that the first op behind it that knows any tells apart; absent: none does.

    Raises
    ------
    InputError
        If the file is not ONNX or damaged.
    """
    file = read_onnx(path)
    sources = {info.name: {info.name} for info in file.model.graph.input if info.name not in file.weights}
    found: dict[str, KnownTexts] = {}
    for node in file.model.graph.node:
        behind = set().union(*(sources.get(name, set()) for name in node.input))
        if known := _texts_of(node):
            found = dict.fromkeys(behind, known) | found
        for name in node.output:
            sources[name] = behind
    return found


def _texts_of(node: NodeProto) -> KnownTexts | None:
    name = _TEXTS.get(node.op_type)
    raw = next((attribute.strings for attribute in node.attribute if attribute.name == name), ())
    texts = tuple(text.decode(errors="replace") for text in raw)
    return KnownTexts(texts, node.op_type in _OF_WORDS) if texts else None
