"""Questions over one consistent cut of a run: typed views, invariants, the token ledger. No torch, no Ray."""
