-- Values of groups of rows, such as those of each bucket: the number of rows, the mean, and the sums of the second to
-- fourth powers of the values about it, which are 0 if all are equal or some are not finite.
WITH sums AS (
    SELECT
        $group AS group_number,
        count(*) AS rows,
        fsum(value) / rows AS m,
        fsum(value ** 2) AS p2,
        fsum(value ** 3) AS p3,
        fsum(value ** 4) AS p4,
        p2 - rows * m ** 2 AS difference,
        -- The sums are large numbers of which small differences remain, so equal values rarely give 0.
        isfinite(difference) AND difference >= 1e-12 * p2 AS differ
    FROM shuffled
    GROUP BY group_number
)

SELECT
    group_number,
    rows,
    m,
    CASE WHEN differ THEN difference ELSE 0 END AS second,
    CASE WHEN differ THEN p3 - 3 * m * p2 + 2 * m ** 3 * rows ELSE 0 END,
    -- At least second ** 2 / rows (Cauchy-Schwarz); rounding may give less.
    CASE WHEN differ THEN greatest(p4 - 4 * m * p3 + 6 * m ** 2 * p2 - 3 * m ** 4 * rows, second ** 2 / rows) ELSE 0 END
FROM sums
ORDER BY group_number
