-- Minimum and maximum value, and whether all values are finite.
SELECT min(value) AS least, max(value) AS greatest, coalesce(bool_and(isfinite(value)), true) AS finite
FROM shuffled
