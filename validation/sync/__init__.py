"""Synchronisation between ranks: explored under a memory model, stressed on real memory, bounded in numbers."""
