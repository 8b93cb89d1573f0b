"""The floors of the design: imports point down only, and the core stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cocofl
from cocofl.fl.strategies import STRATEGIES

PACKAGE = Path(cocofl.__file__).parent

# Top to bottom. Rooms on one floor do not import each other.
FLOORS = [
    {"cli"},
    {"reproduction"},
    {"flower", "report", "comparison", "trackers"},
    {"experiment"},
    {"config"},
    {"engine"},
    {"runlog"},
    {"codecs", "kernels", "metrics", "strategies"},
    {"fl"},
    {"profiling"},
    {"vector"},
    {"freeze"},
    {"chain"},
    {"models", "data"},
    {"accounting", "checks", "local_rule", "numerics"},
    {"allocator", "budget", "files", "hub", "named", "one_line", "rng", "source", "span"},
    {"errors"},
]
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}

# Frameworks touch only the rooms that adapt them; `import cocofl` costs torch and numpy only.
CORE_IMPORTS = {"numpy", "torch"}
ADAPTED_IMPORTS: dict[str, set[str]] = {
    "accounting": {"dp_accounting"},
    "cli": {"rich", "typer"},
    "data": {
        "PIL",
        "datasets",
        "huggingface_hub",
        "pyarrow",
        "sentencepiece",
        "sklearn",
        "tokenizers",
    },
    "flower": {"cryptography", "flwr", "httpx"},
    "freeze": {"onnxruntime"},
    "models": {"transformers"},
    "report": {"jinja2", "markupsafe", "matplotlib", "plotly"},
    "runlog": {"safetensors"},
    "trackers": {"mlflow", "wandb"},
    "vector": {"triton"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor they point to"
            assert node.module is not None
            names.append(node.module)
            if node.module == "cocofl":
                names += [f"cocofl.{alias.name}" for alias in node.names]
    return names


def sources() -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.name not in ("__init__.py", "__main__.py")
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_the_floors(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, (
        f"{room} has no floor: add it to FLOORS and to docs/reference/architecture.md"
    )
    for name in imported_modules(path):
        root, *rest = name.split(".")
        if root == "cocofl" and rest and rest[0] != room:
            assert rest[0] in LEVEL, f"{path.name} imports {name} from the package's own front door"
            assert LEVEL[rest[0]] > LEVEL[room], (
                f"{path.name} imports {name}, which is not below {room}"
            )


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_frameworks_touch_only_their_adapters(path: Path) -> None:
    allowed = CORE_IMPORTS | ADAPTED_IMPORTS.get(room_of(path), set()) | {"cocofl"}
    foreign = {name.split(".")[0] for name in imported_modules(path)} - sys.stdlib_module_names
    assert foreign <= allowed


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nobody_knows_a_strategy_by_its_name(path: Path) -> None:
    if path.parent.name == "strategies" or path.name == "config.py":  # which has the default
        return
    constants = {node.value for node in _nodes(path, ast.Constant)}
    ambiguous = {"cocofl", "small"}  # the program's name, and a size
    assert not constants & (STRATEGIES.keys() - ambiguous)
    compared = {
        side.value
        for node in _nodes(path, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Constant)
    }
    assert not compared & ambiguous


def _nodes(path: Path, kind: type[ast.AST]) -> list[Any]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


def test_importing_cocofl_costs_torch_and_numpy_only() -> None:
    heavy = (
        "datasets dp_accounting flwr matplotlib onnxruntime pandas PIL plotly pyarrow ray rich "
        "safetensors scipy sklearn tokenizers transformers typer"
    )
    code = f"import sys, cocofl; print([m for m in {heavy.split()} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_documentation_has_the_same_floors() -> None:
    page = (PACKAGE.parents[1] / "docs/reference/architecture.md").read_text(encoding="utf-8")
    table = page.partition("| floor | what it holds |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    told = [{name.strip(" `/").removesuffix(".py") for name in row.split(",")} for row in rows]
    assert told == FLOORS


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sources()
    }
    waiting = {
        name: {found for found in imported_modules(path) if found in modules and found != name}
        for name, path in modules.items()
    }
    while free := [name for name, needs in waiting.items() if not needs]:
        for name in free:
            del waiting[name]
        for needs in waiting.values():
            needs.difference_update(free)
    assert not waiting, f"a cycle of imports: {sorted(waiting)}"


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in sources()
        if "kernels" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    assert not long
