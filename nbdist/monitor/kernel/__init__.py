"""The threads that sample ranks once a second, and the page for Prometheus."""
