"""The benchmark: fourteen kernel tasks with references and baselines, hardware constants and the roofline."""
