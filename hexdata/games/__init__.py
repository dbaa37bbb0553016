"""Which game each position of a source belongs to, what is suspicious about it, and what its labels mean.

Works on raw batches and tables of a source, wherever they lie. Never opens a file and never repairs.
"""
