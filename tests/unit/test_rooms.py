"""Import rules: the imports allowed in each room, as in docs/architecture.md, and the cost of an import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import burst_train
import pytest

import burst_attention

ROOT, TRAIN = Path(burst_attention.__file__).parent, Path(burst_train.__file__).parent
NAME, REPOSITORY = ROOT.name, Path(__file__).parents[2]
MOST_LEVELS = 7

# What a room may import from the other rooms of its distribution. What is not named is forbidden, so a new room can
# import nothing, and nothing can import it, until it stands here.
ROOMS: dict[str, set[str]] = {
    "plan": set(),
    "comm": set(),
    "launch": set(),
    "memory": {"comm"},
    "planner": {"plan"},
    "kernels": {"plan"},
    "attention": {"", "plan", "planner", "comm", "kernels"},
    "recurrence": {"attention", "plan", "comm", "kernels"},
    "loss": {"attention", "comm"},
    "testing": {"attention", "plan", "comm", "kernels", "launch"},
    "integrations": {"attention", "comm", "loss", "memory", "plan", "recurrence"},
    "inference": {"attention", "comm", "integrations", "plan"},
    "compat": {"attention", "plan", "planner", "comm", "integrations"},
    "cli": {"", "plan", "planner", "attention", "inference", "integrations", "kernels", "launch", "testing"},
}
TRAIN_ROOMS: dict[str, set[str]] = {
    "checked": set(),
    "presets": set(),
    "memory": set(),
    "figures": set(),
    "engines": set(),
    "config": {"checked", "engines", "memory", "presets"},
    "run": {"config", "checked"},
    "data": {"config", "run", "checked", "presets"},
    "checkpoint": {"config", "run", "data", "checked"},
    "health": {"engines", "run", "data"},
    "step": {"config", "engines", "memory", "presets", "run", "data", "checkpoint", "health"},
    "forecast": {"engines", "memory", "presets", "step", "health"},
    "cli": {"config", "engines", "memory", "presets", "figures", "run", "data", "checkpoint", "step", "forecast"},
}
LAWS = {ROOT: ROOMS, TRAIN: TRAIN_ROOMS}
# Narrower: of ``plan`` a kernel knows its tiles; no kernel knows another.
ONLY = {"kernels": {"plan": {"plan.tile"}}}

# Third-party packages except torch and numpy. A star: imported only inside a function, when needed.
THIRD_PARTIES: dict[str, set[str]] = {
    "burst_attention/kernels": {"*triton", "*flash_attn", "*flash_attn_interface"},
    "burst_attention/kernels/triton": {"triton"},
    "burst_attention/integrations": {"transformers", "accelerate"},
    "burst_attention/inference": {"transformers", "*safetensors"},
    "burst_attention/compat": {"transformers"},
    "burst_attention/launch": {"rich"},
    "burst_attention/testing": {"*rich"},
    "burst_attention/cli": {"rich", "tyro", "*transformers"},
    "burst_train": {
        NAME,
        "transformers",
        "*tokenizers",
        "*datasets",
        "*matplotlib",
        "*safetensors",
        "pydantic",
        "tomli_w",
        "*peft",
        "*torchao",
        "*wandb",
    },
    "burst_train/cli": {"rich", "tyro"},
}


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[str, bool]]:
    """Yield (absolute name, whether the module's import triggers it) of each import in a file."""
    package = (root.name, *path.relative_to(root).parts[:-1])
    tree = ast.parse(path.read_text("utf-8"))
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, id(node) not in lazy) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            yield from ((f"{base}.{name.name}", id(node) not in lazy) for name in node.names)


def room_of(name: str, root: Path = ROOT) -> str:
    """Return ``plan`` for ``burst_attention.plan.tile.Tile``; for a name that the package re-exports, its origin.

    Empty for what is the package's own, its version.
    """
    first = name.split(".")[1]
    if (root / first).is_dir() or (root / f"{first}.py").is_file():
        return first
    return "".join(getattr(getattr(burst_attention, first), "__module__", NAME).split(".")[1:2])


def crossings(root: Path, rooms: Mapping[str, set[str]]) -> list[str]:
    """Return every import inside a distribution that its law does not name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        room = place.parts[0].removesuffix(".py")
        if room == "__init__":  # the face of the package
            continue
        for name, _ in imports(path, root):
            if not name.startswith(f"{root.name}."):
                continue
            target, narrow = room_of(name, root), ONLY.get(room, {})
            inside = name.removeprefix(f"{root.name}.")
            allowed = target == room or target in rooms.get(room, set())
            if root.name == NAME and target in narrow:
                allowed &= any(f"{inside}.".startswith(f"{each}.") for each in narrow[target])
            if not allowed:
                found.append(f"{place} imports {name}")
    return found


def levels(rooms: Mapping[str, set[str]]) -> dict[str, int]:
    """Return each room's level: one above the highest that it imports. RecursionError if they import in a circle."""

    def level(room: str) -> int:
        return 1 + max((level(other) for other in rooms[room] if other), default=0)

    return {room: level(room) for room in rooms}


@pytest.mark.parametrize("root", LAWS, ids=lambda root: root.name)
def test_rooms_import_what_the_law_names(root: Path) -> None:
    assert not crossings(root, LAWS[root])
    assert {path.stem for path in root.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__init__"} <= {
        *LAWS[root],
        "__pycache__",
    }


@pytest.mark.parametrize("root", LAWS, ids=lambda root: root.name)
def test_every_import_that_the_law_names_is_made(root: Path) -> None:
    """Otherwise the rules would allow imports that no room needs."""
    made = {
        (path.relative_to(root).parts[0].removesuffix(".py"), room_of(name, root))
        for path in root.rglob("*.py")
        for name, _ in imports(path, root)
        if name.startswith(f"{root.name}.")
    }
    assert {(room, other) for room, others in LAWS[root].items() for other in others} <= made


def test_the_library_never_imports_the_distributions_that_use_it() -> None:
    users = ("burst_train", "burst_bench")
    found = [f"{path}: {name}" for path in ROOT.rglob("*.py") for name, _ in imports(path) if name.startswith(users)]
    assert not found


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("plan/layout.py", "from ..kernels import choose"),
        ("comm/local.py", "from burst_attention.plan.tile import Tiles"),
        ("kernels/aten.py", "from ..plan.route import ROUTES"),
        ("attention/sweep.py", "import burst_attention.integrations.hf"),
        ("serving/cache.py", "from ..attention import Plan"),  # a room that the law does not know
        ("loss.py", "from . import testing"),
    ],
)
def test_a_violation_is_seen(tmp_path: Path, place: str, line: str) -> None:
    root = tmp_path / NAME
    for room in (*ROOMS, place.partition("/")[0]):
        if room.endswith(".py") or room == "loss":
            (root / "loss.py").parent.mkdir(exist_ok=True)
            (root / "loss.py").touch()
        else:
            (root / room).mkdir(parents=True, exist_ok=True)
    (root / place).write_text(f"{line}\n")
    assert len(crossings(root, ROOMS)) == 1


def test_there_are_few_levels_and_no_circle() -> None:
    assert max(levels(ROOMS).values()) <= MOST_LEVELS
    assert max(levels(TRAIN_ROOMS).values()) <= MOST_LEVELS + 1
    with pytest.raises(RecursionError):
        levels({"a": {"b"}, "b": {"a"}})


@pytest.mark.parametrize("root", LAWS, ids=lambda root: root.name)
def test_modules_do_not_import_each_other_in_a_circle(root: Path) -> None:
    """This also holds within rooms, and for deferred imports."""
    names = {".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in names.items() if path != root / "__init__.py"}

    def known(name: str) -> str | None:
        while name and name not in names:
            name = name.rpartition(".")[0]
        return name or None

    edges = {name: {known(n) for n, top in imports(path, root) if top} - {None, name} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in edges[name]:
                if not name.startswith(f"{other}."):  # a package's face is imported with each of its modules
                    visit(other, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


@pytest.mark.parametrize("root", LAWS, ids=lambda root: root.name)
def test_third_parties_are_imported_behind_their_doors(root: Path) -> None:
    found = []
    for path in sorted(root.rglob("*.py")):
        place = f"{root.name}/{path.relative_to(root)}"
        allowed = {x for room, names in THIRD_PARTIES.items() if place.startswith(f"{room}/") for x in names}
        for name, at_once in imports(path, root):
            top = name.split(".")[0]
            if top in {root.name, "torch", "numpy", *sys.stdlib_module_names}:
                continue
            if top not in allowed and (at_once or f"*{top}" not in allowed):
                found.append(f"{place} imports {name}")
    assert not found


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_library_needs_torch_and_numpy_only() -> None:
    """A fresh interpreter with everything else blocked still computes."""
    run_python(
        "import sys\n"
        "for name in ('transformers', 'datasets', 'safetensors', 'matplotlib', 'tensorboard', 'tyro', 'rich', 'triton',"
        " 'flash_attn', 'hypothesis', 'pytest'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from burst_attention import Mask, burst_attention, make_plan\n"
        "from burst_attention import loss, testing\n"
        "from burst_attention.compat import ring_flash_attn, yunchang\n"
        "q = torch.randn(1, 2, 9, 4, requires_grad=True)\n"
        "burst_attention(q, q, q, make_plan(9, mask=Mask(window=3))).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_importing_the_library_imports_nothing_heavy() -> None:
    heavy = run_python(
        "import sys, burst_attention\n"
        "print([n for n in ('transformers', 'datasets', 'matplotlib', 'triton', 'tyro', 'rich') if n in sys.modules])\n"
    )
    assert heavy.strip() == "[]"


def test_importing_the_library_loads_only_what_a_call_needs() -> None:
    loaded = run_python(
        "import sys, burst_attention\nprint(*(n for n in sys.modules if n.startswith('burst_')))\n"
    ).split()
    rooms = {name.split(".")[1] for name in loaded if name.startswith(f"{NAME}.")}
    assert rooms == {"plan", "planner", "comm", "kernels", "attention"}
    assert not [name for name in loaded if not name.startswith(NAME)]


@pytest.mark.parametrize("sources", ["src", "train/src", "benchmarks/src"])
def test_no_two_classes_of_a_distribution_have_one_name(sources: str) -> None:
    found = Counter(
        node.name
        for path in sorted((REPOSITORY / sources).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert found and not [name for name, count in found.items() if count > 1]
