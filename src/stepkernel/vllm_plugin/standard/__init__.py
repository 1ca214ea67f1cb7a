"""The standard path: the stages of a program in torch, for steps of any shape."""
