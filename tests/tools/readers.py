"""Which code reads each setting of a configuration, and whether two model types have the same code for it."""

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from transformers import PreTrainedConfig

Readers = dict[str, set[tuple[str, str]]]  # by setting: the module, and the class or function in it, or its method


@contextlib.contextmanager
def reads(config: PreTrainedConfig, found: Readers) -> Iterator[None]:
    """Note who reads which setting, of all configurations of this class."""
    kind = type(config)
    stock = kind.__getattribute__

    def noting(self: Any, name: str) -> Any:
        frame = sys._getframe(1)
        found.setdefault(name, set()).add((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
        return stock(self, name)

    with mock.patch.object(kind, "__getattribute__", noting):
        yield


def code_of(config: PreTrainedConfig, name: str, values: list[Any], found: Readers) -> str | None:
    """Return a digest of the values, and of the code that reads a setting, without the family's name.

    None if no class or function of a modeling file reads it. The code is that of each reader, and of all that it names
    in its file. So two model types with one digest treat the setting alike, whatever else they differ in.
    """
    readers = sorted(each for each in found.get(name, ()) if each[0].startswith("transformers."))
    if not any(".modeling_" in module and module.startswith("transformers.models.") for module, _ in readers):
        return None
    family = type(config).__name__.removesuffix("Config").removesuffix("Text")
    code = sorted(
        _closure(module, top, family) if module.startswith("transformers.models.") else f"{module}.{top}"
        for module, top in readers
    )
    return hashlib.sha256(repr((name, _form(values), code)).encode()).hexdigest()[:16]


def _form(value: Any) -> Any:
    """A value without its floats: factors are alike."""
    if isinstance(value, dict):
        return sorted((str(key), _form(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return [_form(inner) for inner in value]
    return "float" if isinstance(value, float) and value else repr(value)


@functools.cache
def _closure(module: str, top: str, family: str) -> str:
    """The code of a class or function, and of all that it names in its file, transitively."""
    places = _places(module)
    # A configuration's method derives a setting from others; its class also lists all that they are.
    own = top if ".configuration_" in module and top in places else top.partition(".")[0]
    seen, waiting = {own}, [own]
    while waiting:
        node = places.get(waiting.pop())
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()
        waiting += names & places.keys() - seen
        seen |= names & places.keys()
    text = "\n".join(sorted(ast.unparse(places[each]).replace(family, "Own") for each in seen if each in places))
    return text.replace(module.split(".")[2], "own")  # the family's package


@functools.cache
def _places(module: str) -> dict[str, ast.AST]:
    """What a file defines at its top, by name, without docstrings; of what it imports, the module and the name."""
    found: dict[str, ast.AST] = {}
    stock = importlib.import_module(module.removesuffix("_64"))  # of a copy in fp64
    tree = ast.parse(inspect.getsource(stock))
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found |= {f"{node.name}.{each.name}": each for each in methods}
        elif isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name: ast.ImportFrom(node.module, [name], node.level) for name in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found
