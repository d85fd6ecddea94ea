"""Frameworks' code against ``deep_ep``: see README.md in this folder.

A module for each framework has the modules that are ``IMPORTED`` of a checkout as they are; ``load(rank)``, which makes them importable and is
called once in each process; and ``cases()``, which run on a :class:`~callers.harness.Rank` and raise if something is wrong.
"""
