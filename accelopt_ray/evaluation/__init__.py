"""One evaluation of one kernel: compile, predict or measure, check."""
