"""Feeding a trainer with games as they are made: stages on threads, joined by bounded queues.

``hub``, ``queue``, ``stage`` and ``pipeline`` are the frame; each other file is a stage, or what one needs.
"""
