"""Executes PTX on the CPU and reports what is wrong with it. See README.md."""

from ptxcheck.launch import launch
from ptxcheck.memory import Memory
from ptxcheck.parser import parse
from ptxcheck.report import Finding, LaunchError, Result, Traffic
from ptxcheck.syntax import PtxError

__all__ = ["Finding", "LaunchError", "Memory", "PtxError", "Result", "Traffic", "launch", "parse"]
