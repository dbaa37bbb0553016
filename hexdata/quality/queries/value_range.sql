-- The least and the greatest value, and whether all are numbers.
SELECT min(value) AS least, max(value) AS greatest, coalesce(bool_and(isfinite(value)), true) AS finite
FROM shuffled
