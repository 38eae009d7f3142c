"""Print the test files that depend on a package, by the import graph of the sources and of the tests.

    python tests/tools/dependents.py PACKAGE ...        (make test-for PACKAGE=kernels)

PACKAGE is a package of the library such as ``kernels``, or a dotted name such as ``burst_train.data``. What a package
only offers again (``from burst_attention import Mask``) counts as an import of its origin. That a test runs on ranks
of ``burst_attention.testing`` counts only for that package.
"""

import argparse
import ast
import importlib
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("burst_attention", "burst_train", "burst_bench")
HARNESS = "burst_attention.testing"


def origins(name: str, path: Path) -> set[str]:
    """Return the modules from which a file takes what a distribution's own ``__init__`` offers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == name and not node.level:
            face = importlib.import_module(name)
            found |= {getattr(getattr(face, each.name, None), "__module__", name) for each in node.names}
    return found


def dependents(packages: list[str]) -> list[str]:
    """Return the paths of the test files, sorted. ValueError: a package is unknown."""
    graph = grimp.build_graph(*DISTRIBUTIONS, "tests", cache_dir=None)
    for module in graph.modules:
        source = ROOT / Path(*module.split(".")).with_suffix(".py")  # of a test; the distributions lie elsewhere
        for face in DISTRIBUTIONS:
            if graph.direct_import_exists(importer=module, imported=face):
                graph.remove_import(importer=module, imported=face)
                for origin in (origins(face, source) if source.is_file() else set()) & graph.modules:
                    graph.add_import(importer=module, imported=origin)
    names = [name if name.split(".")[0] in DISTRIBUTIONS else f"burst_attention.{name}" for name in packages]
    if unknown := [name for name in names if name not in graph.modules]:
        raise ValueError(f"no package is named {', '.join(unknown)}; name one such as kernels or burst_train.data")
    if HARNESS not in names:
        for module in graph.find_descendants(HARNESS) | {HARNESS}:
            graph.remove_module(module)
    known = set().union(*(graph.find_downstream_modules(name, as_package=True) for name in names))
    files = (ROOT / Path(*module.split(".")).with_suffix(".py") for module in known if ".test_" in module)
    return sorted(str(path.relative_to(ROOT)) for path in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE")
    sys.path.insert(0, str(ROOT))
    try:
        print(*dependents(parser.parse_args().packages))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
