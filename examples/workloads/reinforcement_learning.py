"""Reinforcement learning: advantage actor-critic (A2C) learns to balance a pole on a cart.

    python reinforcement_learning.py --batch 16 --steps 165

Here ``--batch`` is the number of environments that are played at once.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import torch
from cartpole import CartPoleProcess, CartPoles
from torch import Tensor, nn
from torch.nn import functional
from training import Defaults, Metrics, Stateful, fill_defaults, make_parser, positive, prepare, train

DEFAULTS = Defaults(steps=165, batch=16)
ROLLOUT = 16  # environment steps per training step
DISCOUNT = 0.99
GAE_DECAY = 0.95
ENTROPY_WEIGHT = 0.01
REWARD_SCALE = 0.1  # keeps the values near 10 when nothing falls
SCALE = torch.tensor([1.0, 1.0, 0.1, 1.0])  # of an observation: position, speed, angle, angular speed


class ActorCritic(nn.Module):
    """Two small networks: logits of the two actions, and the value of the state."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        scaled = states / SCALE
        return self.actor(scaled), self.critic(scaled).squeeze(-1)


def advantages(rewards: Tensor, values: Tensor, last: Tensor, alive: Tensor) -> Tensor:
    """Generalised advantage estimates (Schulman et al., 2016).

    Args:
        rewards: (T, N).
        values: The critic's values of the states acted in, (T, N).
        last: The values of the states after the rollout, (N,).
        alive: 1 where the episode went on after the step, else 0, (T, N).
    """
    result = torch.zeros_like(rewards)
    carried = torch.zeros_like(last)
    following = last
    for step in reversed(range(len(rewards))):
        surprise = rewards[step] + DISCOUNT * following * alive[step] - values[step]
        carried = surprise + DISCOUNT * GAE_DECAY * alive[step] * carried
        result[step] = carried
        following = values[step]
    return result


class ReinforcementLearning:
    """The task for the training loop."""

    def __init__(self, poles: CartPoleProcess, environments: int, seed: int) -> None:
        self._poles = poles
        self._seed = seed
        self._model = ActorCritic()
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-3)
        self._lengths = np.zeros(environments)
        self._mean_length = 20.0  # of an episode; where an untrained policy is

    def train_step(self) -> Metrics:
        states, actions, rewards, alive = [], [], [], []
        for _ in range(ROLLOUT):
            state = torch.from_numpy(self._poles.state)
            with torch.no_grad():
                logits, _ = self._model(state)
            action = torch.multinomial(logits.softmax(dim=1), 1).squeeze(1)
            fell, ended = self._poles.step(action.numpy())
            self._count_lengths(ended)
            states.append(state)
            actions.append(action)
            rewards.append(torch.from_numpy(~fell).float() * REWARD_SCALE)
            alive.append(torch.from_numpy(~ended).float())
        return {"loss": self._update(states, actions, rewards, alive), "episode": self._mean_length}

    def _update(self, states: list[Tensor], actions: list[Tensor], rewards: list[Tensor], alive: list[Tensor]) -> float:
        logits, values = self._model(torch.stack(states))
        with torch.no_grad():
            _, last = self._model(torch.from_numpy(self._poles.state))
        gains = advantages(torch.stack(rewards), values.detach(), last, torch.stack(alive))
        log_probabilities = logits.log_softmax(dim=2)
        chosen = log_probabilities.gather(2, torch.stack(actions).unsqueeze(2)).squeeze(2)
        normal = (gains - gains.mean()) / (gains.std() + 1e-6)
        policy_loss = -(chosen * normal).mean()
        value_loss = functional.smooth_l1_loss(values, gains + values.detach())
        entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=2).mean()
        loss = policy_loss + value_loss - ENTROPY_WEIGHT * entropy
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)
        self._optimizer.step()
        return float(loss.item())

    def _count_lengths(self, ended: np.ndarray) -> None:
        self._lengths += 1
        for length in self._lengths[ended]:
            self._mean_length += 0.05 * (length - self._mean_length)
        self._lengths[ended] = 0

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Mean length of the first episodes of eight poles when the likeliest action is taken, at most 200 steps."""
        poles = CartPoles(8, self._seed + 1)
        standing = np.ones(8, dtype=bool)
        total = 0
        for _ in range(200):
            logits, _ = self._model(torch.from_numpy(poles.state.astype(np.float32)))
            total += int(standing.sum())
            _, ended = poles.step(logits.argmax(dim=1).numpy())
            standing &= ~ended
            if not standing.any():
                break
        return {"balanced": total / 8}

    def parts(self) -> dict[str, Stateful]:
        return {"network": self._model, "optimizer": self._optimizer}


def main() -> int:
    """Train with the options of the command line."""
    parser = make_parser("Learn to balance a pole on a cart.", reads_storage=False)
    parser.add_argument("--latency-ms", type=positive, default=3.5, help="of one environment step (default 3.5)")
    args = parser.parse_args()
    fill_defaults(args, DEFAULTS)
    prepare(args)
    poles = CartPoleProcess(args.batch, args.latency_ms / 1e3, args.seed)
    with contextlib.closing(poles):
        return train(ReinforcementLearning(poles, args.batch, args.seed), args)


if __name__ == "__main__":
    sys.exit(main())
