"""Aggregates: frozen states, and how each event moves them (`evolve`)."""
