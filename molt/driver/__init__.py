"""The driver's side of a run: it starts the parts, decides on groups, plans steps and records what came of them."""
