"""What crosses a process boundary: topology, spans, the ring file, batches and commands.

Everything else in Paceline may import this package; it imports nothing of ours.
"""
