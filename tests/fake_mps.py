"""A stand-in for ``nvidia-cuda-mps-control``: a script that a test puts on PATH, with a real process as its daemon.

The daemon listens on a socket in its pipe folder, as the real one does. What it should say lies in files of a folder
that it knows: ``servers``, ``clients``, ``status``, and ``gone`` (clients it refuses to end, since they are no more);
the commands it got are in ``asked``. Its behaviour goes by
``FAKE_MPS``, by the file ``how.GPU`` for one GPU or by the file ``how``:

* ``refuse``: does not start;
* ``stuck``: the start does not return, and leaves a process behind that no file tells of;
* ``hang``: its process lives and takes commands, and answers none of them for as long as it is told so;
* ``open``: keeps the output of its start open for as long as it lives;
* ``mute``: ends every conversation at once, without an answer;
* ``stubborn``: does not quit.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

_SCRIPT = """#!{python} -S
import os, socket, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
notes = {notes!r}
pidfile = pipe + "/nvidia-cuda-mps-control.pid"

def told(name):
    try:
        with open(notes + "/" + name) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""

def how():
    return os.environ.get("FAKE_MPS", "") or told("how." + gpu) or told("how")

def note(text):
    with open(notes + "/asked", "a") as file:
        file.write(text + "\\n")

def start():
    note("-d " + gpu)
    if how() == "refuse":
        print("cannot open the device")
        sys.exit(1)
    with open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "w") as log:
        log.write("started\\n")
    os.chdir(pipe)  # a socket's path may have 107 characters
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("control")
    listener.listen(16)
    stuck, keeps_open = how() == "stuck", how() == "open"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if stuck:
            os.execv("/bin/sleep", ["nvidia-cuda-mps-control", "300"])
        if not keeps_open:
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
        serve(listener)
    if stuck:
        time.sleep(300)
    with open(pidfile, "w") as file:
        file.write(str(pid))

def serve(listener):
    listener.settimeout(300)
    while True:
        connection = listener.accept()[0]
        command = connection.makefile().readline().strip()
        while how() == "hang":
            time.sleep(0.02)
        now = how()
        if now != "mute" and command.split()[-1] not in told("gone").split():
            try:
                connection.sendall(b"!" + answer(command).encode())
            except OSError:
                continue  # nobody waits for it any more
        if command == "quit" and now not in ("mute", "stubborn"):
            os.remove(pidfile)
            os._exit(0)
        connection.close()

def answer(command):
    word = command.split()[0]
    names = {"get_server_list": "servers", "get_client_list": "clients", "get_server_status": "status"}
    return told(names[word]) or ("ACTIVE" if word == "get_server_status" else "") if word in names else ""

def ask():
    connection = socket.socket(socket.AF_UNIX)
    try:
        os.chdir(pipe)
        connection.connect("control")
    except OSError:
        print("Cannot find MPS control daemon process", file=sys.stderr)
        sys.exit(1)
    command = sys.stdin.read().strip()
    note(command)
    connection.sendall(command.encode() + b"\\n")
    said = connection.makefile().read()
    if not said:
        sys.exit(1)
    print(said[1:])

start() if sys.argv[1:] == ["-d"] else ask()
"""


class FakeMps:
    """The script on PATH and the files that tell it what to say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._notes = folder / "notes"
        self._notes.mkdir(parents=True)
        (self._notes / "asked").touch()
        script = folder / "bin" / "nvidia-cuda-mps-control"
        script.parent.mkdir()
        script.write_text(_SCRIPT.replace("{python}", sys.executable).replace("{notes!r}", repr(str(self._notes))))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self._script = script
        self.temp = folder / "t"
        self.temp.mkdir()
        monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def say(self, *, gpu: str = "", **answers: str) -> None:
        """What it answers from now on: servers, clients, status; and ``how`` it behaves, on one GPU or everywhere."""
        for name, answer in answers.items():
            (self._notes / (f"{name}.{gpu}" if gpu else name)).write_text(answer)

    @property
    def asked(self) -> list[str]:
        """The commands it was given."""
        return (self._notes / "asked").read_text().splitlines()

    def daemons(self, gpu: str = "") -> list[int]:
        """Process numbers of its daemons that are still there, also of those being started; of one GPU or of all."""
        mine = str(self._notes.parent).encode()
        of_gpu = f"CUDA_VISIBLE_DEVICES={gpu}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                serves = str(self._script).encode() in command and b"-d" in command
                left = command[0] == self._script.name.encode()
                of_test = any(mine in value for value in environment)
                if (serves or left) and of_test and (not gpu or of_gpu in environment):
                    found.append(int(entry.name))
        return found
