"""SOAP: Adam in the eigenbasis of the gradients' second moments; on small networks it needs half of Adam's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.site_messages import Values

__all__ = ["SOAP"]


class SOAP(torch.optim.Optimizer):
    """Adam on gradients G that are turned to the eigenvectors of the running means of G G' and G' G.

    A coordinate of the turned gradient says how a whole direction of a layer's inputs moves one of its outputs, so that
    directions in which the loss is curved little move as fast as others. Eigenvectors follow by a step of orthogonal
    iteration now and then. A coordinate waits while its last gradient and the running mean point in opposite ways, as
    where the rate makes it swing. Biases and other vectors are moved by Adam, and so is a side of a matrix that is
    longer than ``max_side``; dims in front of the last two are a batch of matrices. The first step only measures.
    Parameters of one shape are moved at once, for the time it takes; one of them without a gradient stays where it is.
    Made for losses on simulations: an ELBO, whose gradients of few draws are noisier, is better left to Adam.

    Args:
        params: parameters, or groups of them.
        lr: rate, of the size of Adam's.
        betas: of the running means of gradients and of their squares.
        basis_beta: of the running means of G G' and G' G.
        basis_every: steps between turns of the basis.
        max_side: features of the longest side with a basis of its own.
        weight_decay: share of a matrix that a step takes off it, times the rate, as AdamW does.
        eps: as Adam's.

    References:
        Vyas et al. 2025, "SOAP: Improving and Stabilizing Shampoo using Adam"; Liang et al. 2025, "Cautious Optimizers:
        Improving Training with One Line of Code", for what waits; there the others move the more for it.

    Example:
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> mixed, wanted = torch.tensor([[1.0, 0.0], [1.0, 0.1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> optimizer = SOAP([weight], lr=0.1)
        >>> for _ in range(200):
        ...     loss = ((weight - wanted) @ mixed).square().sum()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(loss < 1e-3)
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.03,
        betas: tuple[float, float] = (0.95, 0.99),
        basis_beta: float = 0.98,
        basis_every: int = 10,
        max_side: int = 256,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        if lr < 0 or basis_every < 1 or not all(0 <= beta < 1 for beta in (*betas, basis_beta)):
            raise ValueError(
                f"Expected lr >= 0, betas and basis_beta within [0, 1), and basis_every of at least 1; got {lr}, "
                f"{betas}, {basis_beta} and {basis_every}."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "basis_beta": basis_beta,
            "basis_every": basis_every,
            "max_side": max_side,
            "weight_decay": weight_decay,
            "eps": eps,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Moves the parameters that have gradients; returns what the closure returns."""
        found = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                kind = parameter.shape, parameter.dtype, parameter.device
                alike.setdefault(kind, []).append(parameter)
            for parameters in alike.values():
                if any(parameter.grad is not None for parameter in parameters):
                    _move(parameters, self.state[parameters[0]], group)
        return found


def _move(parameters: list[Tensor], state: dict[str, Any], group: dict[str, Any]) -> None:
    """Moves parameters of one shape by their gradients."""
    gradient = torch.stack(
        [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    )
    moments = _moments(gradient, group["max_side"])
    if not state:
        state["step"] = 0
        state["mean"] = torch.zeros_like(gradient)
        state["square"] = torch.zeros_like(gradient)
        for side, moment in moments.items():
            state[side] = moment
            state["basis_" + side] = torch.linalg.eigh(moment.double())[1].to(moment).flip(-1)
        if moments:
            return
    state["step"] += 1
    beta_mean, beta_square = group["betas"]
    turned = _turned(gradient, state)
    state["mean"].lerp_(turned, 1 - beta_mean)
    state["square"].mul_(beta_square).addcmul_(turned, turned, value=1 - beta_square)
    scale = (state["square"] / (1 - beta_square ** state["step"])).sqrt_()
    move = state["mean"] / (1 - beta_mean ** state["step"]) / scale.add_(group["eps"])
    move *= move * turned > 0  # the others wait
    decay = group["lr"] * group["weight_decay"] if gradient.dim() > 2 else 0.0
    for parameter, moved in zip(parameters, _turned(move, state, back=True)):
        if parameter.grad is not None:
            parameter.mul_(1 - decay).sub_(moved, alpha=group["lr"])
    for side, moment in moments.items():
        state[side].lerp_(moment, 1 - group["basis_beta"])
    if state["step"] % group["basis_every"] == 0:
        mean = _turned(state["mean"], state, back=True)
        for side in moments:
            state["basis_" + side] = torch.linalg.qr(state[side] @ state["basis_" + side])[0]
        state["mean"] = _turned(mean, state)


def _moments(gradient: Tensor, max_side: int) -> Values:
    """Returns G G' as ``left`` and G' G as ``right``, of sides up to ``max_side``; of vectors none."""
    sides = {"left": gradient, "right": gradient.mT} if gradient.dim() > 2 else {}
    return {
        name: matrix @ matrix.mT for name, matrix in sides.items() if matrix.shape[-2] <= max_side
    }


def _turned(value: Tensor, state: dict[str, Any], back: bool = False) -> Tensor:
    """Returns a matrix in the coordinates of the eigenbasis; with ``back``, a matrix given in these coordinates."""
    left, right = state.get("basis_left"), state.get("basis_right")
    if left is not None:
        value = (left if back else left.mT) @ value
    return value if right is None else value @ (right.mT if back else right)
