"""Measurements and conformance checks that a GPU host runs."""
