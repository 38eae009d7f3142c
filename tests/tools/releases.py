"""Which causal model types compute by other code in another release of transformers.

``python tests/tools/releases.py SITE_PACKAGES`` reads the files of both without importing the other's. Types whose code
is the same need no second run of ``settings.py``: its verdicts hold for both. Left out of the comparison are names of
the cache (``past_key_values`` and ``cache_params`` became ``cache`` in 5.24), classes of outputs, docstrings, imports,
plans of tensor parallelism, and decorators.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CACHE = re.compile(r"past_key_values?|cache_params")
UNREAD = (
    "base_model_tp_plan",
    "base_model_pp_plan",
    "keys_to_ignore_at_inference",
    "logger",
    "_can_record_outputs",
    "_skip_keys",
)


class _Code(ast.NodeTransformer):
    """Takes away what changes no number."""

    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        self.generic_visit(node)
        node.decorator_list = []
        bases = [ast.unparse(base) for base in node.bases]
        return None if any(re.search(r"(Output|OutputWith\w+)$", base) for base in bases) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        names = [ast.unparse(target) for target in node.targets]
        return None if any(name.startswith(UNREAD) for name in names) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "update":  # a cache's, which 5.24 gives more
            node.keywords = [each for each in node.keywords if each.arg != "kwargs"]
        return node


def code_of(text: str) -> set[str]:
    """Return what a file defines, in any order, without what changes no number."""
    tree = _Code().visit(ast.parse(CACHE.sub("cache", text)))
    return {ast.dump(each) for each in tree.body}


def files_of(folder: Path) -> dict[str, Path]:
    """Return a model's modeling and configuration files, by name."""
    return {path.name: path for kind in ("modeling", "configuration") for path in folder.glob(f"{kind}_*.py")}


def types_that_differ(other: Path) -> Iterator[str]:
    """Yield the causal types of both releases whose files in the folder ``other``, of models, have other code."""
    here = Path(transformers.__file__).parent / "models"
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        name = CONFIG_MAPPING[model_type].__module__.split(".")[-2]
        mine, theirs = files_of(here / name), files_of(other / name)
        if theirs and any(
            file not in theirs or code_of(mine[file].read_text("utf-8")) != code_of(theirs[file].read_text("utf-8"))
            for file in mine
        ):
            yield model_type


if __name__ == "__main__":
    print(*types_that_differ(Path(sys.argv[1]) / "transformers" / "models"))
