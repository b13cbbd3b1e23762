"""What people see of a run: the live panel, the heartbeat, harmless text."""
