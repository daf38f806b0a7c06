"""The lab: several hosts on one machine, so that what crosses a network can be measured. ``scripts/lab`` runs it.

``network`` makes hosts and removes them, ``ranks`` runs commands in them, ``traffic`` compares interfaces with the ranks'
own counts, ``command`` is the command line. Nothing here needs more than Python's standard library and iproute2.
"""
