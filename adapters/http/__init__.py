"""The door: an OpenAI-compatible gateway in front of the scheduler, health and metrics."""
