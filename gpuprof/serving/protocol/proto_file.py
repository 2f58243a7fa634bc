"""Reads a proto3 file into message classes when the program starts.

Generated code would tie the package to the one version of Protocol Buffers that generated it, and would collide with
the generated code of other packages that know the same protocol. The classes here live in a pool of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TOKEN = re.compile(r'//[^\n]*|"[^"]*"|[A-Za-z_][\w.]*|\d+|[{}=;<>,()]')
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name.removeprefix("TYPE_").lower(): value
    for name, value in _Field.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP")
}


@dataclass(frozen=True, slots=True)
class Method:
    """A call of a service: the names of its messages, and which of them are streams."""

    name: str
    request: str
    response: str
    streams_in: bool
    streams_out: bool


class ProtoFile:
    """The messages and the services of a proto3 file.

    Understands what the files of this package use: messages, nested ones, enums, ``oneof``, ``map``, ``repeated``,
    services; no imports, options or extensions.

    Parameters
    ----------
    text : str
    name : str
        Of the file, for errors.

    Raises
    ------
    ValueError
        For anything that it does not understand.
    """

    def __init__(self, text: str, name: str) -> None:
        self._tokens = _tokens(text)
        self._file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
        self.methods: dict[str, list[Method]] = {}
        self._read()
        enums = set(_enum_names(self._file))
        _resolve(self._file.message_type, enums)
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(self._file.SerializeToString())
        self._pool = pool
        self._classes: dict[str, Any] = {}

    def message(self, name: str) -> Any:
        """Return the class of a message; nested ones as ``Outer.Inner``."""
        found = self._classes.get(name)
        if found is None:
            described = self._pool.FindMessageTypeByName(f"{self._file.package}.{name}")
            found = self._classes[name] = message_factory.GetMessageClass(described)
        return found

    @property
    def package(self) -> str:
        """The package that the file declares."""
        return str(self._file.package)

    def _next(self, expected: str | None = None) -> str:
        token = next(self._tokens, "")
        if not token or (expected is not None and token != expected):
            raise ValueError(f"{self._file.name}: expected {expected or 'more'} but got {token or 'the end'!r}")
        return token

    def _read(self) -> None:
        for word in self._tokens:
            if word == "syntax":
                self._next("=")
                self._next('"proto3"')
                self._next(";")
            elif word == "package":
                self._file.package = self._next()
                self._next(";")
            elif word == "message":
                self._message(self._file.message_type.add())
            elif word == "enum":
                self._enum(self._file.enum_type.add())
            elif word == "service":
                self._service()
            else:
                raise ValueError(f"{self._file.name}: does not understand {word!r}")

    def _message(self, message: Any) -> None:
        message.name = self._next()
        self._next("{")
        while (word := self._next()) != "}":
            if word == "message":
                self._message(message.nested_type.add())
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "oneof":
                message.oneof_decl.add(name=self._next())
                self._next("{")
                while (inner := self._next()) != "}":
                    self._field(message, inner).oneof_index = len(message.oneof_decl) - 1
            else:
                self._field(message, word)

    def _field(self, message: Any, word: str) -> Any:
        field = message.field.add(label=_Field.LABEL_OPTIONAL)
        if word == "repeated":
            field.label = _Field.LABEL_REPEATED
            word = self._next()
        if word == "map":
            word = self._map_entry(message, field)
        field.name = self._next()
        if word == "":
            entry = message.nested_type[-1]
            entry.name = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
            word = entry.name
        self._next("=")
        field.number = int(self._next())
        self._next(";")
        _set_type(field, word)
        return field

    def _map_entry(self, message: Any, field: Any) -> str:
        """Read the types of a map into a nested message; its name follows from the field's."""
        field.label = _Field.LABEL_REPEATED
        entry = message.nested_type.add()
        entry.options.map_entry = True
        self._next("<")
        for number, name in ((1, "key"), (2, "value")):
            part = entry.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
            _set_type(part, self._next())
            self._next("," if number == 1 else ">")
        return ""

    def _enum(self, enum: Any) -> None:
        enum.name = self._next()
        self._next("{")
        while (name := self._next()) != "}":
            self._next("=")
            enum.value.add(name=name, number=int(self._next()))
            self._next(";")

    def _service(self) -> None:
        methods = self.methods.setdefault(self._next(), [])
        self._next("{")
        while self._next() != "}":
            name = self._next()
            request, streams_in = self._message_name()
            self._next("returns")
            response, streams_out = self._message_name()
            self._next(";")
            methods.append(Method(name, request, response, streams_in, streams_out))

    def _message_name(self) -> tuple[str, bool]:
        self._next("(")
        word = self._next()
        streams = word == "stream"
        if streams:
            word = self._next()
        self._next(")")
        return word, streams


def _tokens(text: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(text) if not match[0].startswith("//"))


def _set_type(field: Any, word: str) -> None:
    if word in _SCALARS:
        field.type = _SCALARS[word]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = word  # relative, resolved by the pool from the inside out


def _enum_names(owner: Any) -> Iterator[str]:
    yield from (enum.name for enum in owner.enum_type)
    for message in owner.nested_type if hasattr(owner, "nested_type") else owner.message_type:
        yield from _enum_names(message)


def _resolve(messages: Any, enums: set[str]) -> None:
    """Tell enums from messages, which look alike where they are used."""
    for message in messages:
        for field in message.field:
            if field.type_name in enums:
                field.type = _Field.TYPE_ENUM
        _resolve(message.nested_type, enums)
