"""Judge by its code whether a module's forward treats each token independently.

Operations that are known to do so pass; any other operation of torch is reported. Submodules and functions of
transformers outside of its models are not followed: the first are judged by their own code, the second are its core.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import sys
import textwrap
import threading
from collections.abc import Iterator
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .known import REVIEWED, names

# Operations of torch, functions and methods, that treat each row of the last dimension independently, make tensors, or
# move no value from one token to another.
_APART = names(
    """
    abs add add_ addcmul bfloat16 bitwise_and bitwise_not bitwise_or bool ceil clamp clamp_ clamp_max clamp_min clip
    clone contiguous copy_ cos cosine data detach device dim div div_ double dropout dtype elu embedding empty
    empty_like eq erf exp expand expand_as expm1 fill_ finfo flatten float floor floor_divide from_numpy full
    full_like ge gelu get_autocast_dtype get_default_dtype get_device get_device_module get_dtype grad greater gt
    half hardswish hardtanh iinfo int is_autocast_enabled is_complex is_contiguous is_floating_point is_grad_enabled
    is_nested is_tensor is_tracing isfinite isinf isnan item itemsize keys layer_norm le leaky_relu lerp log log1p
    log2 logical_and logical_not logical_or logsigmoid long lt masked_fill masked_fill_ maximum minimum mish mul
    mul_ multiply ndim ne neg new_empty new_full new_ones new_tensor new_zeros no_grad nonzero numel numpy one_hot
    ones ones_like parameters polar pow quick_gelu reciprocal register_buffer relu relu6 relu_ remainder repeat
    repeat_interleave requires_grad reshape reshape_as rms_norm round rsqrt rsub scalar_tensor selu shape sigmoid
    sign silu sin size softplus sparse_coo sqrt square squeeze stack storage stride sub sub_ tanh tensor threshold
    to tolist torch_dtype type type_as unflatten unsqueeze unsqueeze_ untyped_storage values view view_as
    view_as_complex view_as_real where zero_ zeros zeros_like
    """
)
# Those that reduce, sort, join, cut or pick along a dimension: they must name the last one, or use it by default.
_ALONG = names(
    """
    all amax amin any argmax argmin argsort cat chunk concat concatenate gather index_add index_add_ index_select
    linalg_vector_norm log_softmax logsumexp max mean min norm normalize prod scatter scatter_ scatter_add
    scatter_add_ softmax sort split split_with_sizes std sum tensor_split topk unbind var
    """
)
_CUTS = names("chunk split split_with_sizes tensor_split unbind")  # by default along the first dimension
_BY_DEFAULT = _CUTS | names("argsort sort topk")
# Those that may also be along the first dimension, of sequences or of flattened tokens: experts collect their tokens.
_PICKING = _CUTS | names(
    """
    cat concat concatenate gather index_add index_add_ index_select scatter scatter_ scatter_add scatter_add_
    """
)
# Operations whose dimension is their second argument; of others it is the first.
_SECOND = names("chunk linalg_vector_norm norm normalize split split_with_sizes tensor_split topk")
_PRODUCTS = names("addmm baddbmm bmm einsum linear matmul mm")  # one factor must be a weight
_TURNS = names("T mT movedim permute swapaxes swapdims t transpose")
_TRUSTED = frozenset(sys.stdlib_module_names) | {"torch", "transformers"}  # torch's are judged by their names
_PLACING = names("arange")  # a body gets position_ids, and counts only if there are none
_PARSING = threading.Lock()  # Python 3.11 counts the depth of trees for all threads together
_RANDOM = names("bernoulli rand rand_like uniform_")


def mixing(module: nn.Module, kind: type, judged: dict[Any, str | None], *, attends: bool) -> str | None:
    """Return an operation of a module's code that may mix tokens; None if there is none.

    Args:
        kind: the class that defines the module's forward.
        judged: results of modules like this one, which are kept there.
        attends: whether the module calls the attention that exchanges keys and values; it may turn its heads.
    """
    own = vars(module)
    held = chain(own["_modules"].items(), own["_parameters"].items(), own["_buffers"].items())
    present = (name for name, x in held if x is not None)
    functions = (id(x) for x in own.values() if callable(x))
    key = type(module), attends, *own, *present, *functions
    if key not in judged:
        judged[key] = _first(module, kind, attends)
    return judged[key]


def _first(module: nn.Module, kind: type, attends: bool) -> str | None:
    passed = REVIEWED.get(kind.__name__, names("")) if kind.__module__.startswith("transformers.models.") else names("")
    if attends:
        passed |= _TURNS
    if isinstance(module, PreTrainedModel):
        passed |= _PLACING
    if any(is_rate(name) for name in vars(module)):
        passed |= _RANDOM  # refused by their rate
    operations = _operations(vars(kind)["forward"], module, kind.__module__.split(".")[0], set())
    return next((operation for operation in operations if operation not in passed), None)


def is_rate(name: str) -> bool:
    """Return whether an attribute of this name is the rate of something random."""
    return name == "p" or "drop" in name or "jitter" in name


def _operations(function: Any, module: nn.Module | None, root: str, seen: set[Any]) -> Iterator[str]:
    """Yield what may mix tokens in a function, and in the functions of the same package that it calls."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if (function, module) in seen:
        return
    seen.add((function, module))
    tree = _tree(function) if isinstance(function, FunctionType) else None
    if tree is None:
        yield "code that cannot be read"
        return
    scope = _Scope(function, tree, module)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(node.func) for node in calls}
    for node in ast.walk(tree):
        operation = None
        if isinstance(node, (ast.Import, ast.ImportFrom)) and root == "transformers_modules":
            operation = "a name that it imports itself"
        elif isinstance(node, ast.Assign) and root == "transformers_modules" and _is_of_torch(scope.value(node.value)):
            operation = "a name of its own for an operation"
        elif isinstance(node, ast.Call):
            operation = _of_call(node, scope)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operation = None if scope.fixed(node.left) or scope.fixed(node.right) else "matmul"
        elif isinstance(node, ast.Subscript):
            operation = None if scope.fixed(node.value) else _of_index(node, scope)
        elif isinstance(node, ast.Attribute) and id(node) not in called and not scope.fixed(node.value):
            operation = _torch_name(node, scope)
            operation = None if operation in (*_APART, "max", "min") else operation  # torch.finfo(dtype).min
        if operation:
            yield operation
    for node in calls:
        target = scope.value(node.func)
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            target = inspect.getattr_static(owner, "forward")
        target = getattr(target, "__func__", target)
        home = getattr(inspect.unwrap(target), "__module__", None) or "" if callable(target) else ""
        if isinstance(target, type):
            if issubclass(target, nn.Module):
                yield target.__name__
        elif isinstance(target, FunctionType) and (
            home.startswith("transformers.models.") or home.split(".")[0] == root != "transformers"
        ):
            yield from _operations(target, owner if isinstance(owner, nn.Module) else None, root, seen)
        elif home and home.split(".")[0] not in _TRUSTED and not isinstance(target, nn.Module):
            yield f"{home}.{getattr(target, '__name__', '')}"


@functools.cache
def _tree(function: FunctionType) -> ast.Module | None:
    try:
        with _PARSING:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ast.Module(tree.body, [])  # without decorators, defaults and annotations
    return ast.Module([tree], [])


class _Scope:
    """What the names of a function stand for, and which local names hold no activations."""

    def __init__(self, function: FunctionType, tree: ast.AST, module: nn.Module | None) -> None:
        code = function.__code__
        self._names = {**vars(builtins), **function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                self._names[name] = cell.cell_contents
        for name in code.co_varnames:
            self._names.pop(name, None)
        if module is not None and code.co_argcount:
            self._names[code.co_varnames[0]] = module
        self._module = module
        self._fixed: set[str] = set()  # weights, what is made of them, and one-hot choices
        self.rows: set[str] = set()  # numbers of rows that were picked
        assigned: dict[str, list[bool]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                targets = [each.id for x in node.targets for each in ast.walk(x) if isinstance(each, ast.Name)]
                for name in targets:
                    assigned.setdefault(name, []).append(self.fixed(node.value))
                    self._fixed = {each for each, every in assigned.items() if all(every)}
                if isinstance(node.value, ast.Call) and _called(node.value) in ("where", "nonzero"):
                    self.rows |= {*targets}

    def value(self, node: ast.AST) -> Any:
        """Return the object that an expression names, or None."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super":
            return None if self._module is None else getattr(super(self._names["__class__"], self._module), node.attr)
        owner = self.value(node.value)
        value = None if owner is None or isinstance(owner, torch.Tensor) else getattr(owner, node.attr, None)
        return value.func if isinstance(value, functools.partial) else value

    def fixed(self, node: ast.AST) -> bool:
        """Return whether an expression is made of the module's own tensors, or one-hot, and not of activations."""
        if isinstance(node, ast.Name):
            return node.id in self._fixed
        if isinstance(node, ast.Attribute):
            return isinstance(self.value(node), torch.Tensor) or self.fixed(node.value)
        if isinstance(node, (ast.Subscript, ast.UnaryOp)):
            return self.fixed(node.value if isinstance(node, ast.Subscript) else node.operand)
        if isinstance(node, ast.BinOp):
            sides = [x for x in (node.left, node.right) if not isinstance(x, ast.Constant)]
            return bool(sides) and all(map(self.fixed, sides))
        if isinstance(node, ast.Call):
            if _called(node) == "one_hot":
                return True
            function = self.value(node.func)
            if function is None and isinstance(node.func, ast.Attribute):
                return self.fixed(node.func.value)
            of_torch = (getattr(function, "__module__", None) or "").split(".")[0] == "torch"
            return of_torch and bool(node.args) and self.fixed(node.args[0]) and _called(node) not in _PRODUCTS
        return False


def _is_of_torch(value: Any) -> bool:
    """Return whether a value is a module or a function of torch."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return home.split(".")[0] == "torch" and (isinstance(value, ModuleType) or inspect.isroutine(value))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _of_call(node: ast.Call, scope: _Scope) -> str | None:
    """Return the name of a called operation that may mix tokens."""
    name = _torch_name(node.func, scope)
    if name is None or name in _APART:
        return None
    subject = node.func.value if isinstance(node.func, ast.Attribute) and scope.value(node.func) is None else None
    operands = [*([] if subject is None else [subject]), *node.args]
    if operands and scope.fixed(operands[0]) and name not in _PRODUCTS:
        return None
    if name in _PRODUCTS and any(map(scope.fixed, operands)):
        return None
    if name in _ALONG and _is_along_last(node, name, operands):
        return None
    return name


def _torch_name(node: ast.AST, scope: _Scope) -> str | None:
    """Return the name of what is, or may be, a function of torch or a method of a tensor; None for others."""
    value = scope.value(node)
    if value is not None:
        home = (getattr(value, "__module__", None) or type(value).__module__).split(".")[0]
        if not callable(value) or home not in ("torch", "builtins") or isinstance(value, (nn.Module, type)):
            return None
        owner = getattr(value, "__self__", None)
        if home == "builtins" and not (isinstance(owner, type) and owner.__module__.startswith("torch")):
            return None
        if getattr(value, "__func__", None) in (nn.Linear.forward, nn.Embedding.forward, nn.LayerNorm.forward):
            return None
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return None
        return str(getattr(value, "__name__", "an operation of torch"))
    if not isinstance(node, ast.Attribute) or scope.value(node.value) is not None:
        return None
    is_method = callable(getattr(torch.Tensor, node.attr, None)) or node.attr in _TURNS
    return node.attr if is_method else None


def _is_along_last(call: ast.Call, name: str, operands: list[ast.expr]) -> bool:
    """Return whether an operation is along the last dimension."""
    if name in ("max", "min") and len(operands) > 1 and not isinstance(_literal(operands[1]), int):
        return True  # of two tensors
    place = 2 if name in _SECOND else 1
    stated = [word.value for word in call.keywords if word.arg in ("dim", "axis")] or operands[place : place + 1]
    if not stated:
        return name in _BY_DEFAULT
    dims = _literal(stated[0])
    return dims in (-1, [-1], (-1,)) or (name in _PICKING and dims == 0)


def _literal(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _of_index(node: ast.Subscript, scope: _Scope) -> str | None:
    """Return "index" if an index may pick, drop or shift tokens."""
    index = node.slice
    if isinstance(index, ast.Slice):
        reshaped = isinstance(node.value, ast.Call) and _called(node.value) in ("view", "reshape", "flatten")
        return "index" if reshaped else None
    if not isinstance(index, ast.Tuple) or len(index.elts) < 2:
        return None
    first, second = index.elts[:2]
    whole = isinstance(second, ast.Slice) and second.lower is second.upper is second.step is None
    new = isinstance(second, ast.Constant) and second.value in (None, ...)
    picked = isinstance(first, ast.Name) and first.id in scope.rows
    return None if whole or new or picked or isinstance(first, ast.Constant) else "index"
