"""The NumPy executor: the readable meaning of every stage, and the standard path of an embedded session."""
