"""Reads PTX as nvcc writes it: kernels with their parameters, registers and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple


class Fault(Exception):
    """What the kernel did wrong, or an instruction that is not known here."""


class Instruction(NamedTuple):
    name: tuple[str, ...]  # ("ld", "global", "v4", "u32")
    operands: tuple[Any, ...]  # see Entry.operand
    predicate: str | None
    negated: bool
    text: str


class Register(NamedTuple):
    name: str


class Address(NamedTuple):
    base: Any
    offset: int
    coordinates: tuple[Any, ...] | None = None  # in the tensor whose map is there


class Float(NamedTuple):
    bits: int
    width: int


class Symbol(NamedTuple):
    name: str


def registers_in(operand: Any) -> Iterator[str]:
    """The names of the registers of an operand, or of a sequence of them."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Address):
        yield from registers_in((operand.base, *(operand.coordinates or ())))
    elif isinstance(operand, (list, tuple)) and not isinstance(operand, (Symbol, Float)):
        for part in operand:
            yield from registers_in(part)


@dataclass
class Entry:
    """One kernel."""

    name: str
    params: dict[str, int] = field(default_factory=dict)  # offsets
    param_bytes: int = 0
    widths: dict[str, int] = field(default_factory=dict)  # bits of the registers of a prefix, or of one register
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def width(self, register: str) -> int:
        if register not in self.widths:
            prefix = re.match(r"%?[a-zA-Z_]+", register)
            self.widths[register] = self.widths[prefix[0] if prefix else ""]
        return self.widths[register]


class Module:
    """A file of PTX, or what `cuobjdump -ptx` prints of a library: kernels by name, read when asked for."""

    def __init__(self, text: str) -> None:
        self.text = text
        pattern = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{")
        self.heads = {match[1]: match for match in pattern.finditer(text)}

    def entry(self, name: str) -> Entry:
        head = self.heads[name]
        body = re.sub(r"//[^\n]*", "", self.text[head.end() : self.text.find(".entry", head.end())])
        entry = Entry(name)
        _read_params(entry, head[2])
        _read_body(entry, body, 0)
        return entry


def _read_params(entry: Entry, text: str) -> None:
    end = 0
    for match in re.finditer(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?", text):
        size = int(match[2]) // 8
        alignment = int(match[1] or size)
        start = -(-end // alignment) * alignment
        entry.params[match[3]] = start
        end = start + size * int(match[4] or 1)
    entry.param_bytes = end


def _statements(text: str, at: int) -> Iterator[str]:
    """Statements of a body, "{" and "}" of scopes and labels among them, until the body's own end."""
    depth, space, name = 1, re.compile(r"\s*"), re.compile(r"([\w$]+):")
    while depth > 0:
        at += len(space.match(text, at)[0])  # type: ignore[index]
        label = name.match(text, at)
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            yield text[at]
            at += 1
        elif label:
            yield label[0]
            at = label.end()
        else:
            end = text.index(";", at)
            yield " ".join(text[at:end].split())
            at = end + 1


def _read_body(entry: Entry, text: str, at: int) -> None:
    scopes: list[dict[str, str]] = []  # names declared in a scope, renamed: they may hide the kernel's own
    renamed = 0
    statements = list(_statements(text, at))
    for i, statement in enumerate(statements):
        if statement == "{":
            renamed += 1
            scopes.append({label: f"{label}#{renamed}" for label in _labels_of_scope(statements, i)})
        elif statement == "}":
            if scopes:
                scopes.pop()
        elif statement.endswith(":"):
            label = statement[:-1]
            entry.labels[next((s[label] for s in scopes[::-1] if label in s), label)] = len(entry.code)
        elif statement.startswith(".reg"):
            declared = re.match(r"\.reg \.(\w+) (.*)", statement)
            assert declared is not None, statement
            width = 1 if declared[1] == "pred" else int(re.sub(r"\D", "", declared[1]))
            for name in (part.strip() for part in declared[2].split(",")):
                if name.endswith(">"):
                    entry.widths[name.partition("<")[0]] = width
                elif scopes:
                    renamed += 1
                    scopes[-1][name] = f"{name}#{renamed}"
                    entry.widths[scopes[-1][name]] = width
                else:
                    entry.widths[name] = width
        elif not statement.startswith((".pragma", ".loc")):
            entry.code.append(_instruction(entry, statement, {k: v for scope in scopes for k, v in scope.items()}))


def _labels_of_scope(statements: list[str], start: int) -> Iterator[str]:
    """Labels of the scope that opens there, but of no scope within it."""
    depth = 0
    for statement in statements[start:]:
        depth += (statement == "{") - (statement == "}")
        if depth == 0:
            return
        if depth == 1 and statement.endswith(":"):
            yield statement[:-1]


def _instruction(entry: Entry, text: str, names: dict[str, str]) -> Instruction:
    match = re.match(r"(?:@(!?)(\S+) )?([\w.:]+) ?(.*)", text)
    if match is None or text.startswith("."):
        raise Fault(f"statement {text}")
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])
    operands = tuple(_operand(entry, part.strip(), names) for part in parts)
    predicate = names.get(match[2], match[2]) if match[2] else None
    return Instruction(tuple(match[3].split(".")), operands, predicate, match[1] == "!", text)


def _operand(entry: Entry, text: str, names: dict[str, str]) -> Any:
    if text[0] == "{":
        return [_operand(entry, part.strip(), names) for part in text[1:-1].split(",")]
    if text[0] == "[":
        match = re.match(r"\[\s*([%$\w.]+)\s*(?:\+\s*(-?\d+))?\s*(?:,\s*(\{.*\}))?\s*\]", text)
        if match is None:
            raise Fault(f"address {text}")
        coordinates = tuple(_operand(entry, match[3], names)) if match[3] else None
        return Address(_operand(entry, match[1], names), int(match[2] or 0), coordinates)
    if text in names:
        return Register(names[text])
    if "|" in text:  # two results of shfl
        return [_operand(entry, part, names) for part in text.split("|")]
    return _plain_operand(text)


@lru_cache(maxsize=None)
def _plain_operand(text: str) -> Float | int | Symbol | Register:
    """A number, a register, or the name of something else."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Float(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Float(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return Register(text) if text.startswith("%") else Symbol(text)
