"""Finds the game of each position of a source, flags what is suspicious about it, and interprets its labels.

Works on raw batches and tables in memory. It opens no file and repairs nothing.
"""
