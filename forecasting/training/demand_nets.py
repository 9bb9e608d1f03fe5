"""The torch side of the recurrent demand experts: built here, trained by ``demand_fit``, served without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

HIDDEN = 32
LAYERS = 4  # of the convolution: 1 + 2 + 4 + 8 ticks back


class GruNet(nn.Module):
    """Gated recurrent unit and a linear head; input (batch, ticks, F), output (batch, ticks, horizons)."""

    def __init__(self, inputs: int, horizons: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, horizons)
        _begin_as_persistence(self.head)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run over whole sequences from a hidden state of zeros."""
        hidden, _ = self.gru(inputs)
        moves: torch.Tensor = self.head(hidden)
        return moves

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the weights under the names that ``GruExpert`` reads."""
        named: dict[str, torch.Tensor] = {f"gru.{part}": getattr(self.gru, f"{part}_l0") for part in _GRU_PARTS}
        return _plain(named | {"head.weight": self.head.weight, "head.bias": self.head.bias})


class TcnNet(nn.Module):
    """Causal convolution with growing distances, residual; input (batch, ticks, F), output (batch, ticks, horizons)."""

    def __init__(self, inputs: int, horizons: int) -> None:
        super().__init__()
        self.entry = nn.Linear(inputs, HIDDEN)
        self.layers = nn.ModuleList(nn.Conv1d(HIDDEN, HIDDEN, 2, dilation=2**i) for i in range(LAYERS))
        self.head = nn.Linear(HIDDEN, horizons)
        _begin_as_persistence(self.head)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run over whole sequences; before their beginning lie zeros."""
        values = torch.relu(self.entry(inputs)).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            values = values + torch.relu(layer(nn.functional.pad(values, (2**i, 0))))
        moves: torch.Tensor = self.head(values.transpose(1, 2))
        return moves

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the weights under the names that ``TcnExpert`` reads."""
        named: dict[str, torch.Tensor] = {"entry.weight": self.entry.weight, "entry.bias": self.entry.bias}
        for i, layer in enumerate(self.layers):
            for part, value in layer.named_parameters():
                named[f"layer{i}.{part}"] = value
        return _plain(named | {"head.weight": self.head.weight, "head.bias": self.head.bias})


_GRU_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _begin_as_persistence(head: nn.Linear) -> None:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def _plain(named: dict[str, torch.Tensor]) -> dict[str, npt.NDArray[np.generic]]:
    return {name: value.detach().numpy().astype(np.float32) for name, value in named.items()}
