"""``splitup demo``: a network, a model, an execution, its verification and its price, in one go."""

from splitup.demo.report import DemoReport
from splitup.demo.run import run_demo
from splitup.demo.screen import show_report

__all__ = ["DemoReport", "run_demo", "show_report"]
