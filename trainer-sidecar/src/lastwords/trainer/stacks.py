"""Where all threads of this process are."""

from __future__ import annotations

import sys
import threading
import traceback

from lastwords.protocol.messages import StackReport

_MAX_TEXT = 32 * 1024
# Innermost Python frame of a thread that waits for other ranks: collectives called directly, DDP's reducer
# (inside of the autograd engine) and Work.wait.
_COLLECTIVE_PLACES = ("torch/distributed/", "torch/autograd/graph.py", "torch/nn/parallel/distributed.py")


def dump(phase: str = "") -> StackReport:
    """Stacks of all threads, main thread first; a guess whether the main thread waits in a collective."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    texts = []
    for ident in sorted(frames, key=lambda i: (i != main, i)):
        lines = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"--- {names.get(ident, 'thread')} ({ident})\n{lines}")
    inner = frames.get(main) if main is not None else None
    where = inner.f_code.co_filename if inner is not None else ""
    in_collective = any(place in where for place in _COLLECTIVE_PLACES)
    return StackReport(responsive=True, in_collective=in_collective, phase=phase, text="\n".join(texts)[:_MAX_TEXT])
