"""The config file, read and written: settings in the sections that `Settings` names, or at the top, without one.

A value is taken as the text that stands there, as a flag's is: 010 is ten, `no` can be a name, "256" is 256.
null sets nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import yaml

from tpserve import spellings
from tpserve.settings import Section, Settings, UserError
from tpserve.sources import Given, shown, takes_several
from tpserve.spellings import FIELDS, FLAGS

_LARGEST = 64 * 1024  # bytes: several times what all settings take with comments
_COLUMN = 32  # where the comments of `show` begin
_NULL = "tag:yaml.org,2002:null"
_TAGS = {_NULL} | {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp", "seq", "map")}

_SECTIONS: tuple[str, ...] = get_args(Section)
_NAMES = {field: flag.key or field for field, flag in FLAGS.items()}
_KEYS = FIELDS | {name: field for field, name in _NAMES.items()}


def read(name: str) -> tuple[dict[str, Given], list[str]]:
    """(What the file gives, by field; notes on settings of other engines that have no effect.)

    Raises UserError with file and line for whatever cannot be used.
    """
    given: dict[str, Given] = {}
    notes: list[str] = []
    for entry in _entries(name, _parse(name, _text(name))):
        try:
            note = _take(entry, given)
        except UserError as error:
            raise UserError(f"{entry.where}: {error}") from None
        if note:
            notes.append(f"{entry.where}: {note}")
    return given, notes


def show(settings: Settings, given: dict[str, Given]) -> str:
    """A config file of all settings, with a comment behind each that says where it comes from."""
    lines = []
    for section in _SECTIONS:
        fields = [field for field, flag in FLAGS.items() if flag.section == section and not flag.hidden]
        lines += [f"{section}:", *(_line(field, settings, given) for field in fields)]
    return "\n".join(lines)


def _line(field: str, settings: Settings, given: dict[str, Given]) -> str:
    source = given[field].source if field in given else "default"
    source = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in source)  # it may be any file name
    value = getattr(settings, field)
    if FLAGS[field].is_secret:
        value = tuple(shown(field, one) for one in value)
    return f"  {_NAMES[field]}: {_yaml(value)}".ljust(_COLUMN) + f"  # {source}"


def _yaml(value: object) -> str:
    """The value in one line, without what YAML takes for the end of a line, such as U+0085."""
    text = "".join(value) if isinstance(value, tuple) else str(value)
    style = None if text.isprintable() else '"'
    dumped = yaml.safe_dump([value], default_style=style, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(dumped).strip()[1:-1]


@dataclass(frozen=True)
class _Entry:
    where: str  # FILE:LINE
    section: str | None  # None: at the top
    key: str  # as written
    node: yaml.Node


def _text(name: str) -> str:
    try:
        with open(os.path.expanduser(name), "rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UserError(f"config file {name}: {error.strerror}") from None
    if len(data) > _LARGEST:
        raise UserError(f"config file {name}: larger than {_LARGEST} bytes; give a file of settings")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: not UTF-8 text; give a YAML file") from None


def _parse(name: str, text: str) -> yaml.Node | None:
    """The document as nodes, which know their lines and are no values yet: no tag is obeyed, no alias expanded."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{name}:{mark.line + 1}: not YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{name}:{line}: not YAML: {error.reason}") from None
    except RecursionError:
        raise UserError(f"config file {name}: nested too deeply; write settings in sections or without") from None


def _entries(name: str, root: yaml.Node | None) -> Iterator[_Entry]:
    """Every setting in the file."""
    if root is None or root.tag == _NULL:  # nothing but comments
        return
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{name}:{_number(root)}: wants settings, such as tp: 2, in sections or without")
    for top in _pairs(name, root, None):
        section = spellings.key(top.key)
        if section not in _SECTIONS or (section in FIELDS and not isinstance(top.node, yaml.MappingNode)):
            yield top
        elif isinstance(top.node, yaml.MappingNode):
            yield from _pairs(name, top.node, section)
        elif top.node.tag != _NULL:
            raise UserError(f"{top.where}: {top.key} is a section; write its settings below it, indented")


def _pairs(name: str, mapping: yaml.MappingNode, section: str | None) -> Iterator[_Entry]:
    lines: dict[str, int] = {}
    for key, value in mapping.value:
        where = f"{name}:{_number(key)}"
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{where}: wants the name of a setting before the colon")
        if key.value in lines:
            raise UserError(f"{where}: {key.value} is given in line {lines[key.value]} already")
        lines[key.value] = _number(key)
        yield _Entry(where, section, key.value, value)


def _number(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _take(entry: _Entry, given: dict[str, Given]) -> str | None:
    """Add what the entry sets to `given`; returns what there is to tell of it."""
    field = _field(entry)
    if entry.node.tag == _NULL:
        return None
    if field is None:
        return spellings.foreign_note(
            entry.key, entry.node.value if isinstance(entry.node, yaml.ScalarNode) else "of this kind"
        )
    if field in given:
        raise UserError(f"{entry.key} is given at {given[field].source} already")
    several = takes_several(field) and isinstance(entry.node, yaml.SequenceNode)
    values = [_scalar(entry.key, node) for node in (entry.node.value if several else [entry.node])]
    text = ", ".join(values)
    written = f"{entry.where}: {entry.key}: {shown(field, text):.100}"
    given[field] = Given(values if takes_several(field) else text, entry.where, written)
    return None


def _field(entry: _Entry) -> str | None:
    """The setting that the entry names; None if it is foreign. Raises UserError for others."""
    key = spellings.key(entry.key)
    field = _KEYS.get(key)
    if field and entry.section not in (None, FLAGS[field].section):
        raise UserError(f"{entry.key} belongs in the section {FLAGS[field].section}, not in {entry.section}")
    if field or spellings.is_foreign(key):
        return field
    if isinstance(entry.node, yaml.MappingNode):
        raise UserError(f"no such section: {entry.key}; there are {', '.join(_SECTIONS)}")
    raise spellings.unknown(entry.key, {*_KEYS, *(() if entry.section else _SECTIONS)})


def _scalar(key: str, node: yaml.Node) -> str:
    """The text of a value."""
    if node.tag not in _TAGS:
        raise UserError(f"{key} has the tag {node.tag}; write a plain value")
    if not isinstance(node, yaml.ScalarNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "settings of its own"
        raise UserError(f"{key} wants one value, not {kind}")
    return str(node.value)
