"""The default names of the columns in a user's own table: text, label, client."""

from __future__ import annotations

from fl_core.errors import UsageError

CLIENT_COLUMN = "client"
LABEL_COLUMN = "label"
TEXT_COLUMN = "text"
COLUMNS = (CLIENT_COLUMN, LABEL_COLUMN, TEXT_COLUMN)


def check_columns(what: str, *columns: str) -> None:
    """Refuse names of columns for data without columns.

    Raises:
        UsageError: they are not the default ones.
    """
    if columns != COLUMNS:
        raise UsageError(
            f"{what} has no columns to name; client_column, label_column and text_column are for .csv and .jsonl files"
        )
