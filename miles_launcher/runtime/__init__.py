"""The run itself: Ray places the roles, the driver loops, the gate decides."""
