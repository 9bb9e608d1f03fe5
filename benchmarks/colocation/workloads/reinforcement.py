"""The reinforcement learning workload: actor and critic learn from cart-poles in a process of their own."""

from __future__ import annotations

import torch
from benchmarks.colocation.workloads import models
from benchmarks.colocation.workloads.base import Place, Workload
from benchmarks.colocation.workloads.catalogue import Configuration, Environments
from benchmarks.colocation.workloads.helper import ENDED, FELL
from benchmarks.colocation.workloads.processes import Helper
from torch import Tensor, nn
from torch.nn import functional

DISCOUNT = 0.99
ENTROPY_WEIGHT = 0.01
_FLOAT_BYTES = 4


def discounted(rewards: Tensor, alive: Tensor, last: Tensor) -> Tensor:
    """What each step was worth: its reward and the discounted worth of what followed.

    Args:
        rewards: (T, N).
        alive: 1 where the episode went on after the step, else 0; (T, N).
        last: Estimated worth of the states after the last step, (N,).
    """
    worth, worths = last, []
    for reward, goes_on in zip(reversed(rewards), reversed(alive), strict=True):
        worth = reward + DISCOUNT * goes_on * worth
        worths.append(worth)
    return torch.stack(worths[::-1])


class Balancing(Workload):
    """One step plays ``horizon`` steps of all cart-poles and learns from them (advantage actor-critic).

    Choosing the actions waits for the device once per environment step, because the environment needs them.
    """

    def __init__(self, configuration: Configuration, place: Place, seed: int) -> None:
        super().__init__(configuration.describe(), place)
        source = configuration.source
        if not isinstance(source, Environments):
            raise ValueError(f"source {source} is not accepted for {configuration.family}; give Environments")
        self._count, self._horizon = configuration.batch, source.horizon
        self._network = place.put(models.ActorCritic(configuration.width, configuration.depth))
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=3e-4)
        self._poles = Helper("play", {"count": self._count, "latency_s": source.latency_s, "seed": seed})
        self._states, _ = self._observe()

    def _observe(self) -> tuple[Tensor, Tensor]:
        """States (N, 4) on the device and flags (N,) on the host."""
        states_bytes = self._count * models.OBSERVED * _FLOAT_BYTES
        content = torch.frombuffer(bytearray(self._poles.read_exactly(states_bytes + self._count)), dtype=torch.uint8)
        states = content[:states_bytes].view(torch.float32).view(self._count, models.OBSERVED)
        return states.to(self._place.torch_device), content[states_bytes:]

    def step(self) -> float:
        states, actions, flags = [], [], []
        for _ in range(self._horizon):
            with torch.no_grad(), self._place.precision():
                logits = self._network.actor(self._states)
            chosen = torch.multinomial(logits.float().softmax(dim=1), 1).squeeze(1)
            states.append(self._states)
            actions.append(chosen)
            self._poles.write(chosen.to(torch.uint8).cpu().numpy().tobytes())
            self._states, flag = self._observe()
            flags.append(flag)
        return self._learn(torch.stack(states), torch.stack(actions), torch.stack(flags).to(self._place.torch_device))

    def _learn(self, states: Tensor, actions: Tensor, flags: Tensor) -> float:
        """One update from states (T, N, 4), actions (T, N) and flags (T, N); the loss."""
        rewards, alive = (flags & FELL == 0).float(), (flags & ENDED == 0).float()
        with self._place.precision():
            logits, values = self._network(states)
            with torch.no_grad():
                _, last = self._network(self._states)
        gains = discounted(rewards, alive, last) - values
        likely = logits.float().log_softmax(dim=2)
        advantage = gains.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        policy_loss = -(likely.gather(2, actions.unsqueeze(2)).squeeze(2) * advantage).mean()
        value_loss = functional.smooth_l1_loss(gains, torch.zeros_like(gains))
        entropy = -(likely.exp() * likely).sum(dim=2).mean()
        loss = policy_loss + value_loss - ENTROPY_WEIGHT * entropy
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._network.parameters(), 0.5)
        self._optimizer.step()
        return float(loss.item())

    def helper_pids(self) -> list[int]:
        return [self._poles.pid]

    def close(self) -> None:
        self._poles.close()
