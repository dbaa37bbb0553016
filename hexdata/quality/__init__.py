"""Statistical quality of a shuffle, compared with a uniform random order.

``theory`` computes expected values and variances, ``measure`` compares a shuffle with them, and
``input_order`` judges the order of the input. The package never writes to a store.
"""

from hexdata.quality.figures import Figure, Quality
from hexdata.quality.input_order import InputOrder, measure_input_order
from hexdata.quality.measure import measure_quality
from hexdata.quality.theory import DEVIATIONS

__all__ = [
    "DEVIATIONS",
    "Figure",
    "InputOrder",
    "Quality",
    "measure_input_order",
    "measure_quality",
]
