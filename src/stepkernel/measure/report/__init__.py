"""Pictures and a page of records; points of different conditions never share a line."""
