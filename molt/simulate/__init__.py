"""Another bound on staleness, or another filter, tried on the recorded timing of a run; imports no torch."""
