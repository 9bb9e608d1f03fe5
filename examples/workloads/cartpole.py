"""The cart-pole task: its physics, and a process that plays many of them with a real latency per step.

The equations of motion are those of A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive elements that
can solve difficult learning control problems" (IEEE Transactions on Systems, Man, and Cybernetics, 1983), without
friction, in the form that R. V. Florian derived in "Correct equations for the dynamics of the cart-pole system" (2007).
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

GRAVITY = 9.8  # m/s²
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
HALF_LENGTH = 0.5  # m, from the pivot to the pole's centre of mass
FORCE = 10.0  # N, to the left or to the right
STEP_S = 0.02  # of the simulated world
TRACK = 2.4  # m, to either side
MAX_ANGLE = np.deg2rad(12.0)
MAX_STEPS = 500

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Observation = tuple[npt.NDArray[np.float32], Bools, Bools]


def accelerations(state: Floats, force: Floats) -> tuple[Floats, Floats]:
    """Accelerations of cart (m/s²) and pole (rad/s²) for states (N, 4): position, speed, angle, angular speed."""
    angle, spin = state[:, 2], state[:, 3]
    sine, cosine = np.sin(angle), np.cos(angle)
    mass = CART_MASS + POLE_MASS
    push = (force + POLE_MASS * HALF_LENGTH * spin**2 * sine) / mass
    turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine**2 / mass))
    return push - POLE_MASS * HALF_LENGTH * turn * cosine / mass, turn


class CartPoles:
    """``count`` independent cart-poles; one that has ended starts anew at once."""

    def __init__(self, count: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.state: Floats = self._fresh(count)
        self._age = np.zeros(count, dtype=np.int64)

    def step(self, actions: npt.NDArray[np.int64]) -> tuple[Bools, Bools]:
        """Push right where the action is 1, left where it is 0.

        Returns:
            Which poles fell, and which episodes ended (fell, or reached ``MAX_STEPS``). ``state`` is the next one.
        """
        push, turn = accelerations(self.state, np.where(actions == 1, FORCE, -FORCE))
        self.state = self.state + STEP_S * np.stack([self.state[:, 1], push, self.state[:, 3], turn], axis=1)
        self._age += 1
        fell = (np.abs(self.state[:, 0]) > TRACK) | (np.abs(self.state[:, 2]) > MAX_ANGLE)
        ended = fell | (self._age >= MAX_STEPS)
        self.state[ended] = self._fresh(int(ended.sum()))
        self._age[ended] = 0
        return fell, ended

    def _fresh(self, count: int) -> Floats:
        return self._rng.uniform(-0.05, 0.05, (count, 4))


class CartPoleProcess:
    """The same in a process of its own, where a step takes ``latency_s`` (± 10 %), as a simulator or a robot does."""

    def __init__(self, count: int, latency_s: float, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_play, args=(theirs, self._pipe, count, latency_s, seed), name="cartpole", daemon=True
        )
        self._process.start()
        theirs.close()
        self.state: npt.NDArray[np.float32] = self._pipe.recv()

    def step(self, actions: npt.NDArray[np.int64]) -> tuple[Bools, Bools]:
        """As ``CartPoles.step``; waits for the environment."""
        self._pipe.send(actions)
        self.state, fell, ended = self._pipe.recv()
        return fell, ended

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()


def _play(pipe: Connection, owners_end: Connection, count: int, latency_s: float, seed: int) -> None:
    owners_end.close()  # or this process would never see its owner end
    # A signal to the whole process group is the owner's to answer; this process ends with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poles = CartPoles(count, seed)
    jitter = np.random.default_rng(seed)
    try:
        pipe.send(poles.state.astype(np.float32))
        while True:
            actions = pipe.recv()
            time.sleep(latency_s * jitter.uniform(0.9, 1.1))
            fell, ended = poles.step(actions)
            answer: Observation = (poles.state.astype(np.float32), fell, ended)
            pipe.send(answer)
    except (EOFError, ConnectionError):  # the owner has ended
        return
