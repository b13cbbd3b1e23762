"""Faults on purpose: processes killed, bits flipped, files cut, disks full, writers stopped; the evidence goes to docs/evidence."""
