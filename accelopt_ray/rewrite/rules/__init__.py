"""The rewrite rules, grouped by what they look at."""
