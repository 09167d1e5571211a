"""Sweeps: many runs described by one file, planned before anything is spent and summed up when they are done."""
