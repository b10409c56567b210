"""Measures layers on models and data, and turns the measurements into a plan.

Public names come with ``import fedlayers as fl``, such as ``fl.diagnose``.
"""
