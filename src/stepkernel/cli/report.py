"""`stepkernel report`: a page and pictures of records."""


def report() -> None:
    """Pictures of records."""
