"""Integrations with other libraries. Each one imports its library only when you import it."""
