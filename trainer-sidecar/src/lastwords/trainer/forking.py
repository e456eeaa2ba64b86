"""
The zygote: a process that has everything imported and forks rank processes when the launcher asks for one.

It imports and nothing else: a process in which tensors were computed, a device was opened or a thread runs cannot be
forked safely. What that needs is checked before the first fork, and the launcher is told why where it does not hold.
A new process is handed to the launcher as its own child, so it neither depends on the zygote nor dies with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_PR_SET_PDEATHSIG = 1
_LAUNCHER_WAIT_SECONDS = 10.0
_THREAD_END_SECONDS = 2.0
_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED: the driver's answer before anybody has called cuInit."""
_HARMLESS_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx")


def serve(control: socket.socket, launcher: int) -> socket.socket:
    """
    Answer the launcher until it is gone; returns only in a new process, with that one's channel to the launcher.

    The answer to having been started is "ready", or "unsafe" and the reason. Each request is one message with two
    descriptors: the new process's channel and its output.
    """
    if reason := unsafe_reason():
        control.sendall(f"unsafe {reason}\n".encode())
        os._exit(0)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page with objects
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    control.sendall(b"ready\n")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not data:
            os._exit(0)
        channel, output = descriptors
        middle = os.fork()
        if middle == 0:
            # The one in the middle ends at once, which makes the launcher (a subreaper) the parent of the other.
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            control.close()
            return _begin(channel, output, middle, launcher)
        os.waitpid(middle, 0)
        os.close(channel)
        os.close(output)


def die_with(parent: int) -> None:
    """Be killed when the launcher dies; the check afterwards is for one that died before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _begin(channel: int, output: int, middle: int, launcher: int) -> socket.socket:
    """What makes a forked process like one that was started."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.setpgid(0, 0)
    deadline = time.monotonic() + _LAUNCHER_WAIT_SECONDS
    while os.getppid() == middle and time.monotonic() < deadline:
        time.sleep(0.0002)
    die_with(launcher)
    _renew_randomness()
    os.set_inheritable(channel, False)
    connection = socket.socket(fileno=channel)
    connection.sendall(f"born {os.getpid()}\n".encode())
    return connection


def _renew_randomness() -> None:
    """What an interpreter draws at its start; `random` does it by itself after a fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch_random := sys.modules.get("torch.random")) is not None:
        torch_random.default_generator.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)


# --- whether it may be forked -----------------------------------------------------------------------


def unsafe_reason() -> str:
    """Why this process must not be forked; "" when it may be."""
    return _threads() or _devices() or _drivers()


def _threads() -> str:
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not names and len(_tasks()) > 1:
        _stop_threads_of_libraries()
    deadline = time.monotonic() + _THREAD_END_SECONDS
    while len(_tasks()) > 1 and time.monotonic() < deadline and not names:
        time.sleep(0.005)  # one that was joined may still be listed for a moment
    others = [task for task in _tasks() if task != os.getpid()]
    if not others:
        return ""
    return f"imports start threads ({', '.join(names or map(_task_name, others))})"


def _tasks() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _task_name(task: int) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return str(task)


def _stop_threads_of_libraries() -> None:
    """
    Let libraries end the threads that they keep for later, such as OpenBLAS's.

    Those that support forking end them before a fork and start them again when they are needed. So nobody's number of
    threads has to be changed.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    deadline = time.monotonic() + _THREAD_END_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return
        time.sleep(0.001)


def _devices() -> str:
    found = sorted(set(device_files(_open_paths())))
    return f"imports open devices ({', '.join(found)})" if found else ""


def _open_paths() -> Iterable[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists
    with open("/proc/self/maps") as file:
        for line in file:
            if "/dev/" in line:
                yield line.split(maxsplit=5)[5].strip()


def device_files(paths: Iterable[str]) -> Iterable[str]:
    """Those of `paths` that are devices whose state a fork would share."""
    for path in paths:
        if not path.startswith("/dev/") or path.startswith(("/dev/pts/", "/dev/shm/")):
            continue
        if os.path.basename(path) in _HARMLESS_DEVICES:
            continue
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            yield path


def _drivers() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "imports initialise CUDA"
    return driver_reason(_loaded_driver)


def driver_reason(load: Callable[[], Any]) -> str:
    """Asks CUDA's driver itself, since an import may have called it past torch. `load` gives None without one."""
    driver = load()
    if driver is None:
        return ""
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == _NOT_INITIALISED:
        return ""
    return "imports initialise the CUDA driver"


def _loaded_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return None  # nobody has loaded it
