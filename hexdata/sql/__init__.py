"""Read-only SQL over a store: views, macros and named queries."""

from hexdata.sql.database import DATABASE_NAME, write_database
from hexdata.sql.run import QueryResult, named_queries, named_query, run_query
from hexdata.sql.views import SqlLimits, open_catalog
from hexdata.sql.write import json_rows, save_parquet, text_rows, write_csv

__all__ = [
    "DATABASE_NAME",
    "QueryResult",
    "SqlLimits",
    "json_rows",
    "named_queries",
    "named_query",
    "open_catalog",
    "run_query",
    "save_parquet",
    "text_rows",
    "write_csv",
    "write_database",
]
