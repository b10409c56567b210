"""Federated algorithms by name."""

from fl_core.algorithms.base import Algorithm, Message, Problem, Round, State, Update, find, register, registry

__all__ = ["Algorithm", "Message", "Problem", "Round", "State", "Update", "find", "register", "registry"]
