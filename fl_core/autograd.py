"""Nodes of autograd graphs."""

from __future__ import annotations

from typing import Any

Node = Any  # torch.autograd.graph.Node


def nodes(root: Node) -> list[Node]:
    """Return every node that the root depends on, each after its inputs. The root comes last."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((node_in, False) for node_in, _ in node.next_functions if node_in is not None)
    return order
