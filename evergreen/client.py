"""Helpers for people who call an Evergreen server. Imports nothing else of this project."""
