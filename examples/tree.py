"""Learns where the nodes of a tree lie in the hyperbolic plane, and draws them in Poincaré's disk.

Each node attends to all others by distance; its neighbours should get the attention (Nickel and Kiela 2017, Poincaré Embeddings). Their
distances compete with log sum exp(-beta distance) over all other nodes, which is the lse of strobe.hyperbolic_attention.
"""

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import strobe
from strobe import hyperbolic

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--branches", type=int, default=3)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--steps", type=int, default=100, help="of each generation")
parser.add_argument("--beta", type=float, default=8.0, help="how fast attention falls with distance")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--picture", default="tree.png")
options = parser.parse_args()

# Nodes in order of their depth: the children of node i are branches * i + 1 ... branches * i + branches.
depths = torch.cat([torch.full((options.branches**depth,), depth) for depth in range(options.depth + 1)])
child = torch.arange(1, len(depths))
parent = (child - 1) // options.branches
neighbours = torch.zeros(len(depths), len(depths), dtype=torch.bool)
neighbours[child, parent] = neighbours[parent, child] = True
others = ~neighbours.clone().fill_diagonal_(True)


def moved(points: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Moves each point along its tangent `step` (Lorentz coordinates), as far as the tangent is long."""
    length = hyperbolic.lorentz_product(step, step).clamp(min=1e-30).sqrt()[:, None]
    return hyperbolic.lift((torch.cosh(length) * points + torch.sinh(length) * step / length)[:, 1:])


def tangent(points: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The Riemannian gradient: the time-like coordinate changes its sign, and the part that leaves the hyperboloid is removed."""
    gradient = gradient * torch.tensor([-1.0, 1, 1], dtype=gradient.dtype)
    return gradient + hyperbolic.lorentz_product(gradient, points)[:, None] * points


# The tree grows: each generation starts at its parents, because branches that start on the wrong side do not pass through one another.
torch.manual_seed(options.seed)
points = hyperbolic.lift(torch.zeros(1, 2, dtype=torch.float64))
for depth in range(1, options.depth + 1):
    n = int((depths <= depth).sum())
    born = points[parent[len(points) - 1 : n - 1]]
    anywhere = tangent(born, torch.randn_like(born))
    points = torch.cat([points, moved(born, 0.1 * anywhere / hyperbolic.lorentz_product(anywhere, anywhere).sqrt()[:, None])])
    start, end = neighbours[:n, :n].nonzero(as_tuple=True)
    for step in range(options.steps):
        points.requires_grad_()
        heads = points[None, None]  # (batch, heads, nodes, 3)
        _, lse = strobe.hyperbolic_attention(heads, heads, heads, beta=options.beta, mask=others[None, None, :n, :n], return_lse=True)
        near = options.beta * hyperbolic.distance(points[start], points[end])
        loss = F.softplus(near + lse[0, 0, start]).sum()  # -log(exp(-near) / (exp(-near) + exp(lse)))
        loss.backward()
        with torch.no_grad():
            downhill = -0.1 * tangent(points, points.grad)
            length = hyperbolic.lorentz_product(downhill, downhill).clamp(min=0).sqrt()[:, None]
            most = 0.2 * (1 - step / options.steps)
            points = moved(points, downhill * (most / length.clamp(min=most)))
    print(f"depth {depth}: {n} nodes, loss of an edge {loss.item() / len(start):.4f}")

ranks = hyperbolic.distance(points[:, None], points).fill_diagonal_(torch.inf).argsort(-1).argsort(-1) + 1
precisions = []
for node in range(len(depths)):
    found = ranks[node, neighbours[node]].sort().values
    precisions.append((torch.arange(1, len(found) + 1) / found).mean())
print(f"mean average precision {torch.stack(precisions).mean():.3f} (1: each node's neighbours are the nearest to it)")

# The straight line between two points bends in the disk.
a, b = points[parent, None], points[child, None]
d = hyperbolic.distance(a, b)[..., None]
along = torch.linspace(0, 1, 33, dtype=points.dtype)[:, None]
lines = hyperbolic.lorentz_to_poincare((torch.sinh((1 - along) * d) * a + torch.sinh(along * d) * b) / torch.sinh(d))

figure, axes = plt.subplots(figsize=(7, 7), layout="constrained")
axes.add_patch(plt.Circle((0, 0), 1, facecolor="#f7f7f4", edgecolor="black", linewidth=1))
for line in lines:
    axes.plot(line[:, 0], line[:, 1], color="#555555", linewidth=0.9, zorder=1)
disk = hyperbolic.lorentz_to_poincare(points)
dots = axes.scatter(
    disk[:, 0], disk[:, 1], c=depths, cmap=plt.get_cmap("viridis", options.depth + 1), s=28, edgecolor="black", linewidth=0.4
)
dots.set_clim(-0.5, options.depth + 0.5)
figure.colorbar(dots, ax=axes, ticks=range(options.depth + 1), label="depth in the tree", shrink=0.6)
axes.set(xlim=(-1.03, 1.03), ylim=(-1.03, 1.03), aspect="equal", title=f"A tree of {len(depths)} nodes in Poincaré's disk")
axes.set_axis_off()
figure.savefig(options.picture, dpi=150)
print("drawn in", options.picture)
