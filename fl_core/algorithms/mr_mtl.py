"""Models of clients that a penalty keeps close to their mean."""

from __future__ import annotations

from dataclasses import dataclass

from fl_core.algorithms import Context, Message, Round, State, Tree, register
from fl_core.algorithms.averaging import ProximalTerm


@register
class MRMTL(ProximalTerm):
    """One model a client, pulled to the mean of all clients' models (MR-MTL; Liu et al. 2022, Algorithm A1).

    A client continues from its own model w. It minimises loss(w) + (lam / 2) ||w - mean||^2. The server averages what
    the clients send, weighted by training samples. With lam = 0 this is Local, bit for bit. Unlike Ditto there is no
    second model: the mean is that of the personal models.
    """

    name = "mr_mtl"
    paper = "Liu et al. 2022"
    trains, keeps = "all, with a pull to the mean", "its model"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        lam: float = 0.1

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.submodel(rnd, client) - self.task_info.not_yet_trained(rnd)

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        return {**message.trees["model"], **state.trees["model"]}
