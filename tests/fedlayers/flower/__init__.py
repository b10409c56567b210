"""Tests of the Flower app."""
