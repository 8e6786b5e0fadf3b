"""The formats that cross a process boundary: topology, spans, ring files, batches and commands.

Every other package of Paceline may import this one; it imports none of them.
"""
