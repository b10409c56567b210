"""Tables of losses with a known truth."""

from docs.answers import part as part, table_of as table_of
