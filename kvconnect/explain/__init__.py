"""What two workers would do with each other, worked out from their configurations, with neither running.

``cache_file`` reads a configuration, ``tables`` makes the region tables of its ranks without touching
memory, ``paths`` lines two up, ``report`` plans a request, ``runner`` reads files and prints.
"""
