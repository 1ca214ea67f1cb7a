"""One file per stage kind: a device function over constexpr dims, and the kernel that runs it alone."""
