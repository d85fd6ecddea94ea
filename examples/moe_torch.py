"""A small mixture-of-experts layer, trained for some steps: on several CPU ranks, and once more in a single process.

    python examples/moe_torch.py --ranks 4 --steps 30

Under a launcher that sets what torchrun does, each process is one rank, of one node or several:

    MOEXPRESS_FAR=loop moexpress launch -n 4 --nodes 2 -- python examples/moe_torch.py

Each rank has a share of the tokens and of the experts. A router chooses two experts for each token; `moexpress` takes the token's row to
them and brings the weighted sum of their results back, and in the backward pass the gradients, the other way round. The single process
does the same arithmetic without communication, so the losses of both agree.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moexpress import Communicator
from moexpress.autograd import combine, dispatch
from torch import nn

EXPERTS, TOPK, HIDDEN, INNER, TOKENS, CLASSES = 8, 2, 64, 128, 48, 5
MAX_STEPS = 100_000


class Expert(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


class Trunk(nn.Module):
    """What every rank has a copy of: a layer before the experts, the router, and the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows bf16 [tokens, HIDDEN], chosen experts [tokens, TOPK], and their weights."""
        hidden = torch.tanh(self.first(x))
        scores, chosen = self.router(hidden).softmax(1).topk(TOPK, dim=1)
        return hidden.bfloat16(), chosen, scores / scores.sum(1, keepdim=True)


def run_experts(experts: nn.ModuleList, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of a row's experts among these: bf16 [rows, HIDDEN]."""
    total = torch.zeros(x.shape)
    for number, expert in enumerate(experts):
        row, choice = (topk_idx == number).nonzero(as_tuple=True)
        total = total.index_add(0, row, expert(x[row].float()) * weights[row, choice, None])
    return total.bfloat16()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and classes of a rank: noise around one centre a class."""
    centres = torch.randn(CLASSES, HIDDEN, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    classes = torch.randint(CLASSES, (TOKENS,), generator=generator)
    return centres[classes] + torch.randn(TOKENS, HIDDEN, generator=generator), classes


def parts() -> tuple[Trunk, nn.ModuleList]:
    """Trunk and all experts, the same wherever they are made."""
    torch.manual_seed(0)
    return Trunk(), nn.ModuleList(Expert() for _ in range(EXPERTS))


def train_rank(rank: int, ranks: int, steps: int, meet: str, losses: torch.Tensor) -> None:
    """One rank: its tokens, its experts, a copy of the trunk."""
    torch.set_num_threads(1)
    trunk, every_expert = parts()
    local = EXPERTS // ranks
    experts = every_expert[rank * local : (rank + 1) * local]
    # Before the group: torch's first optimiser keeps what groups there are, and gloo's threads that still hold a tensor when the
    # interpreter ends abort the process (pytorch/pytorch#179291).
    optimiser = torch.optim.SGD([*trunk.parameters(), *experts.parameters()], lr=0.5)
    dist.init_process_group("gloo", init_method=meet, world_size=ranks, rank=rank)
    with Communicator(experts=EXPERTS, topk=TOPK, hidden=HIDDEN, device="cpu") as communicator:
        for step in range(steps):
            x, classes = batch(step, rank)
            rows, chosen, weights = trunk.route(x)
            received = dispatch(communicator, rows, chosen, weights)
            y = run_experts(experts, received.x, received.topk_idx, received.topk_weights)
            sums = combine(communicator, y, received.handle)
            loss = nn.functional.cross_entropy(trunk.last(sums.float()), classes, reduction="sum") / (ranks * TOKENS)
            optimiser.zero_grad()
            loss.backward()
            # Experts live on one rank each; the trunk's gradients are those of all ranks' tokens.
            for parameter in trunk.parameters():
                dist.all_reduce(parameter.grad)
            optimiser.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses[step] = total.item()
    dist.destroy_process_group()


class Copies(torch.autograd.Function):
    """A copy for each rank, whose gradients are summed as a combine sums them: in f32, rounded once."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, copies: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for _ in range(copies))

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum(gradient.float() for gradient in gradients).to(gradients[0].dtype), None


def train_alone(ranks: int, steps: int) -> list[float]:
    """The same training in one process, with the experts in groups as the ranks have them."""
    trunk, experts = parts()
    local = EXPERTS // ranks
    optimiser = torch.optim.SGD([*trunk.parameters(), *experts.parameters()], lr=0.5)
    losses = []
    for step in range(steps):
        batches = [batch(step, rank) for rank in range(ranks)]
        routed = [trunk.route(x) for x, _ in batches]
        rows, chosen, weights = (torch.cat(each) for each in zip(*routed, strict=True))
        total = torch.zeros(rows.shape)
        for rank, copy in enumerate(Copies.apply(rows, ranks)):
            here = chosen // local == rank
            row = here.any(1).nonzero()[:, 0]
            idx = torch.where(here, chosen % local, -1)[row]
            y = run_experts(experts[rank * local : (rank + 1) * local], copy[row], idx, weights[row])
            total = total.index_add(0, row, y.float())
        logits = [trunk.last(sums.float()) for sums in total.bfloat16().split(TOKENS)]
        parts_of_loss = [
            nn.functional.cross_entropy(each, classes, reduction="sum") / (ranks * TOKENS)
            for each, (_, classes) in zip(logits, batches, strict=True)
        ]
        loss = sum(parts_of_loss)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains both ways and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="CPU processes; a divisor of 8 (default: 4)")
    parser.add_argument("--steps", type=int, default=30, help="of training (default: 30)")
    options = parser.parse_args()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        options.ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks < 1 or EXPERTS % options.ranks:
        parser.error(f"--ranks is {options.ranks}, allowed: a divisor of the {EXPERTS} experts")
    if not 1 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps is {options.steps}, allowed: 1 to {MAX_STEPS}")
    losses = torch.zeros(options.steps).share_memory_()
    if launched:
        rank = int(os.environ["RANK"])
        train_rank(rank, options.ranks, options.steps, "env://", losses)
        if rank > 0:
            return
    else:
        meet = "file://" + os.path.join(tempfile.mkdtemp(), "store")
        mp.start_processes(
            train_rank, (options.ranks, options.steps, meet, losses), nprocs=options.ranks, start_method="spawn"
        )
    torch.set_num_threads(1)
    alone = train_alone(options.ranks, options.steps)
    furthest = max(abs(a - b) for a, b in zip(losses.tolist(), alone, strict=True))
    for step in range(0, options.steps, max(1, options.steps // 6)):
        print(f"step {step:3}   {options.ranks} ranks {losses[step]:.6f}   one process {alone[step]:.6f}")
    print(f"largest difference {furthest:.2e}; last loss {alone[-1]:.4f}, first {alone[0]:.4f}")
    if not (furthest < 1e-3 and alone[-1] < alone[0]):
        raise SystemExit(
            f"error: largest difference of losses is {furthest:.2e}, allowed: less than 1e-3, and a last below the first"
        )


if __name__ == "__main__":
    main()
