"""The HTML report."""

from __future__ import annotations

from accelopt_ray.analysis.report.document import describe_empty, report_html, write_report

__all__ = ["describe_empty", "report_html", "write_report"]
