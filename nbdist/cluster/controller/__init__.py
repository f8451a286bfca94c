"""Lines that run in the controller's process."""
