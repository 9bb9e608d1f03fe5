"""A stand-in for ``nvidia-cuda-mps-control``: a script that a test puts on PATH, with a real process as its daemon.

What it should say lies in files of a folder that it knows: ``servers``, ``clients``, ``status``; the commands it got
are in ``asked``. Its behaviour goes by ``FAKE_MPS`` or by the file ``how``: ``refuse`` (does not start), ``mute``
(starts, never answers), ``stubborn`` (does not quit).
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

_SCRIPT = """#!{python} -S
import os, signal, subprocess, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
notes = {notes!r}
pidfile = pipe + "/nvidia-cuda-mps-control.pid"

def told(name):
    try:
        with open(notes + "/" + name) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""

how = os.environ.get("FAKE_MPS", "") or told("how")

def note(text):
    with open(notes + "/asked", "a") as file:
        file.write(text + "\\n")

if sys.argv[1:] == ["-d"]:
    note("-d " + os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if how == "refuse":
        print("cannot open the device")
        sys.exit(1)
    with open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w") as log:
        log.write("started\\n")
    daemon = subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(pidfile, "w") as file:
        file.write(str(daemon.pid))
    sys.exit(0)

if not os.path.exists(pidfile):
    print("Cannot find MPS control daemon process", file=sys.stderr)
    sys.exit(1)
command = sys.stdin.read().strip()
note(command)
if how == "mute":
    sys.exit(1)
word = command.split()[0]
if word == "get_server_list":
    print(told("servers"))
elif word == "get_client_list":
    print(told("clients"))
elif word == "get_server_status":
    print(told("status") or "ACTIVE")
elif word == "quit" and how != "stubborn":
    with open(pidfile) as file:
        os.kill(int(file.read()), signal.SIGTERM)
    os.remove(pidfile)
"""


class FakeMps:
    """The script on PATH and the files that tell it what to say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._notes = folder / "notes"
        self._notes.mkdir(parents=True)
        script = folder / "bin" / "nvidia-cuda-mps-control"
        script.parent.mkdir()
        script.write_text(_SCRIPT.replace("{python}", sys.executable).replace("{notes!r}", repr(str(self._notes))))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self.temp = folder / "t"
        self.temp.mkdir()
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def say(self, **answers: str) -> None:
        """What it answers from now on: servers, clients, status; and how it behaves."""
        for name, answer in answers.items():
            (self._notes / name).write_text(answer)

    @property
    def asked(self) -> list[str]:
        """The commands it was given."""
        return (self._notes / "asked").read_text().splitlines()

    def daemons(self) -> list[int]:
        """Process numbers of its daemons that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    environment = (entry / "environ").read_bytes()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self._notes.parent).encode() in environment and command.startswith(b"sleep\0"):
                    found.append(int(entry.name))
        return found
