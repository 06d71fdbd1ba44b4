"""Everything done once, offline: the search for the layers a slim verifier may skip (DIMR)."""
