"""Everything that changes weights."""
