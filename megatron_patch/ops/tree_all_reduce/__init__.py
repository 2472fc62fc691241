"""Sums over ranks in the order of the contract."""
