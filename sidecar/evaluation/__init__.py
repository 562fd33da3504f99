"""Evaluates revisions: the same cases to both, scored without a judge, compared in pairs."""
