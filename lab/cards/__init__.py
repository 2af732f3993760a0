"""Tables over seeds, claims and frontiers of cards."""
