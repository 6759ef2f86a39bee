"""Asks two endpoints the same questions, side by side, and keeps every answer as it comes."""
