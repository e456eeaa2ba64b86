"""Rules of the repository that no other tool checks. They look at what git tracks or would track."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {"lastwords": ROOT / "trainer-sidecar" / "src", "lastwords_operator": ROOT / "operator" / "src"}
LINE_LIMIT = 450
# Put together here, so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(
    "|".join(["/" + "work/", "/" + "farm/", "/tmp/bash" + "_jobs", r"/(?:home|Users)/[a-z]+/", "/" + r"root/\."])
)
PURE = ["lastwords.protocol", "lastwords_operator.core"]


@functools.cache
def tracked() -> list[pathlib.Path]:
    """All files of the repository; without git (an unpacked archive) all but what .gitignore names at the top."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "build", "dist", "runs", "__pycache__"}
        walked = (path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts))
        return sorted(path for path in walked if path.is_file() and "_cache" not in str(path.relative_to(ROOT)))
    return sorted(path for name in listing.split("\0") if name and (path := ROOT / name).is_file())


def python_files() -> list[pathlib.Path]:
    return [path for path in tracked() if path.suffix == ".py"]


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_folder_on_the_way_to_the_sources_is_a_package() -> None:
    """An `__init__.py` in `operator/` replaces the standard library's `operator`, and the interpreter breaks."""
    bad = [folder / "__init__.py" for source in SOURCES.values() for folder in (source, source.parent)]
    assert [name(path) for path in bad if path.exists()] == []


def test_no_tests_below_operator_and_no_test_folder_of_that_name() -> None:
    below = [name(p) for p in python_files() if p.is_relative_to(ROOT / "operator") and p.name.startswith("test_")]
    folders = [path.relative_to(ROOT).parts[:-1] for path in tracked()]
    named = ["/".join(parts) for parts in folders if parts[:1] == ("tests",) and "operator" in parts]
    assert below == []
    assert named == []


def test_operator_is_the_standard_library_when_python_starts_here() -> None:
    code = "import operator; print(operator.itemgetter(0)('x'), operator.__file__)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert out.startswith("x ")
    assert str(ROOT / "operator") not in out


def test_files_stay_short() -> None:
    lengths = {name(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {path: count for path, count in lengths.items() if count > LINE_LIMIT} == {}


def test_no_path_of_one_machine() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [f"{name(path)}:{number}: {line.strip()[:80]}" for number, line in lines if MACHINE_PATH.search(line)]
    assert found == []


def test_lock_holds_exact_versions_and_no_place_to_get_them_from() -> None:
    rows = [row for row in (ROOT / "requirements.lock").read_text().splitlines() if row and not row.startswith("#")]
    assert [row for row in rows if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", row)] == []


def test_everything_in_requirements_in_is_locked() -> None:
    def normal(text: str) -> str:
        return re.sub(r"[-_.]+", "-", text).lower()

    rows = (ROOT / "requirements.in").read_text().splitlines()
    wanted = {normal(re.split(r"[=<>\[]", row)[0]) for row in rows if row and not row.startswith("#")}
    locked = {
        normal(row.split("==")[0]) for row in (ROOT / "requirements.lock").read_text().splitlines() if "==" in row
    }
    assert wanted - locked == set()


def imported_roots(path: pathlib.Path) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("package", [*PURE, "lastwords.launcher"])
def test_standard_library_only(package: str) -> None:
    """The contracts of import-linter name what is forbidden; this names what is allowed."""
    folder = SOURCES[package.split(".")[0]].joinpath(*package.split("."))
    allowed = set(sys.stdlib_module_names) | {"lastwords", package.split(".")[0]}
    assert {name(p): extra for p in folder.rglob("*.py") if (extra := imported_roots(p) - allowed)} == {}


def test_protocol_agent_side_imports_load_no_torch() -> None:
    modules = ["lastwords", "lastwords.protocol", "lastwords.launcher", "lastwords.agent", "lastwords.storage"]
    modules += ["lastwords_operator", "lastwords_operator.core", "lastwords_operator.coordinator"]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("distribution", ["operator", "trainer-sidecar"])
def test_packages_are_typed(distribution: str) -> None:
    (package,) = [path for path in (ROOT / distribution / "src").iterdir() if (path / "__init__.py").exists()]
    assert (package / "py.typed").exists()
