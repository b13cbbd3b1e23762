"""The trajectory log: five tables in one order, written once, read by trainer, replay and audit alike."""
