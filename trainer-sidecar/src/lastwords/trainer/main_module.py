"""Running the user's script, module or code as `__main__`, just as a fresh interpreter would."""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence

SCRIPT, MODULE, CODE = "script", "module", "code"


def run(kind: str, target: str, arguments: Sequence[str], words: Sequence[str]) -> None:
    """
    Run `target`, a script's path, a module's name or code; returns when it ends, raises what it raises.

    `words` is the whole command line, for `sys.orig_argv`.
    """
    sys.orig_argv[:] = words
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if kind == MODULE:
        sys.argv[:] = [target, *arguments]
        _insert_path(os.getcwd())
        # What the interpreter itself calls for -m; runpy's public functions run the module in another namespace.
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif kind == CODE:
        sys.argv[:] = ["-c", *arguments]
        _insert_path("")
        main.__loader__ = importlib.machinery.BuiltinImporter
        exec(compile(target, "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv[:] = [target, *arguments]
        _insert_path(os.path.dirname(os.path.realpath(target)))
        path = os.path.join(os.getcwd(), target)
        main.__file__ = path
        vars(main)["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def own_frames() -> frozenset[str]:
    """Files whose frames are not of the user's program."""
    return frozenset({__file__, runpy.__file__ or "", "<frozen runpy>"})


def _insert_path(folder: str) -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, folder)
