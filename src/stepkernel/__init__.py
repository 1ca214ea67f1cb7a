"""StepKernel: one prepared program per decode step for the Kimi K3 family."""

__version__ = "0.1.0"
