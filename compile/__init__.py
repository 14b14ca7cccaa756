"""Graphs, artifacts and the runtime that runs them."""
